"""What the target guesses behind rows of noise in a known text, for the canary of Uno's adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError

_NAME = "canary"
# Tokens of the text in one pass, each with its noise: no more rows than a prompt's passes have.
_TOKENS = 16


class _Target(Protocol):
    """What is asked of the target; see ``services.verifier.model.target``."""

    def open(self, request_id: str, rows: int) -> bool: ...

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None: ...

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]: ...

    def close(self, request_id: str) -> None: ...


# Is given ``guess_behind_noise`` of a target.
TryNoise = Callable[[Callable[[Sequence[int], int, Sequence[Sequence[int]], bool], torch.Tensor]], object]


def guess_behind_noise(
    target: _Target, tokens: Sequence[int], start: int, noise: Sequence[Sequence[int]], adapted: bool
) -> torch.Tensor:
    """The likeliest token behind each row of noise, [len(noise), rows], int64.

    Args:
        tokens: the text, of at least ``start + len(noise)`` tokens.
        noise: the rows of noise behind token ``start``, behind the one that follows it, and so on; the same number each.
        adapted: whether they have the adapter for noise.

    Raises:
        ConfigurationError: the KV cache has no room for the text.
    """
    end = start + len(noise)
    room = end + _TOKENS * len(noise[0])
    if not target.open(_NAME, room):
        raise ConfigurationError(
            f"the canary's text needs room for {room} tokens in the KV cache", about="verifier.kv_cache_tokens"
        )
    found: list[torch.Tensor] = []
    try:
        for at in range(0, end, _TOKENS):
            own = tokens[at : min(at + _TOKENS, end)]
            behind = [noise[place - start] if place >= start else () for place in range(at, at + len(own))]
            logits = target.forward([_with_noise(at, own, behind, adapted)])[0]
            target.keep(_NAME, at, range(len(own)))
            found.append(logits.argmax(-1))
    finally:
        target.close(_NAME)
    return torch.cat(found).view(len(noise), -1)


def _with_noise(context: int, text: Sequence[int], noise: Sequence[Sequence[int]], adapted: bool) -> Rows:
    """A pass over tokens of a text, as nodes of a chain, with the noise behind each of them, which alone is read."""
    tokens, parents = list(text), [node - 1 for node in range(len(text) - 1)]
    for place, own in enumerate(noise):
        parent = place - 1
        for token in own:
            parents.append(parent)
            parent = len(parents) - 1
            tokens.append(token)
    rows = range(len(text), len(tokens)) if adapted else ()
    return Rows(
        request_id=_NAME,
        context=context,
        tokens=tuple(tokens),
        parents=tuple(parents),
        logits=len(tokens) - len(text),
        noise=tuple(rows),
    )
