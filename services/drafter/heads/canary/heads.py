"""The canary for heads: the shares of their guesses on text that the target wrote itself, and which fault explains low ones.

Layers counted in another way, and rows shifted by one position, are the commonest faults of public heads: everything loads,
and next to nothing is accepted. The fault is found by trying what else the head may have been trained for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.drafter.heads.canary.texts import CanaryText, beside, held_states, shown_layers, states_of
from services.drafter.heads.canary.verdict import DOUBTFUL, LEAST, CanaryResult, check_at, judge, stands_out
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import FINAL, TargetShape, rope_of
from services.drafter.heads.layer import SeenRows
from services.drafter.heads.state_head import StateHead
from speculation.errors import ConfigurationError


def check(head: StateHead, texts: Sequence[CanaryText], target: TargetShape, where: str) -> CanaryResult:
    """Measure a head, and log a doubt.

    Args:
        where: the checkpoint, for errors and the log.

    Raises:
        ConfigurationError: the head is useless as it is; says what was measured and the likely fault. Or the texts lack the
            states that the head reads, or are too short to tell.
    """
    return judge(measure(head, texts, target), where)


def check_checkpoint(head: StateHead, folder: Path, target: Path, *, asked_for: bool = True) -> CanaryResult | None:
    """``check`` a head on the texts in its checkpoint's folder; None if there are none. Otherwise as ``check_at``."""
    return check_at(folder, target, functools.partial(check, head), asked_for=asked_for)


def measure(head: StateHead, texts: Sequence[CanaryText], target: TargetShape) -> CanaryResult:
    """Measure a head as it is, and where that is low, with one thing changed at a time.

    Raises:
        ConfigurationError: the texts lack a layer's states, or are too short.
    """
    layers = head.state_layers
    lacking = [layer for layer in layers if any(held_states(text, layer, target) is None for text in texts)]
    if lacking:
        raise ConfigurationError(
            f"the canary's texts hold no states of layer {lacking[0]}, which the head reads", about="the canary's texts"
        )
    guesses, first, second = _shares(head, texts, target, _Rows(layers=layers))
    if guesses < LEAST:
        raise ConfigurationError(
            f"the canary's texts hold {guesses} tokens to guess: must be {LEAST} at least", about="the canary's texts"
        )
    fault = _explain_first(head, texts, target, first)
    if fault is None:
        fault = _explain_second(head, texts, target, second)
    return CanaryResult(guesses=guesses, first=first, second=second, likely_fault=fault)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """How rows are made of a text: row i is (token i + 1, state i + ``shift``), and guesses token i + 1 + ``ahead``."""

    layers: tuple[int, ...]
    shift: int = 0
    ahead: int = 1


class _Unrolled:
    """A ``TextAttend`` for two passes over the same rows.

    In the second, each row sees true rows up to its own, and itself.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._handed: dict[int, torch.Tensor] = {}
        self._second = False
        self.depths = torch.zeros(1, dtype=torch.int64)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        rows = query.shape[2]
        sees = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
        if self._second:
            first_key, first_value = self._kept[layer]
            key, value = torch.cat((first_key, key), dim=2), torch.cat((first_value, value), dim=2)
            sees = torch.cat((sees, torch.eye(rows, dtype=torch.bool, device=query.device)), dim=1)
        else:
            self._kept[layer] = key, value
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sees, enable_gqa=True)

    def go_on(self) -> None:
        """Begin the second pass."""
        self._second, self.depths = True, self.depths + 1

    def hand_on(self, states: torch.Tensor, number: int) -> None:
        if not self._second:
            self._handed[number] = states

    def handed(self, number: int) -> torch.Tensor:
        given = self._handed[number]
        return given if self._second else torch.nn.functional.pad(given, (0, 0, 1, 0))[:, :-1]

    def keep(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        self._kept[layer] = keys, values

    @property
    def looking(self) -> torch.Tensor | None:
        return None

    def seen(self, layer: int, window: int | None = None) -> list[SeenRows]:
        (keys,), (values,) = self._kept[layer]
        rows = torch.arange(len(keys), device=keys.device)
        away = rows[:, None] - rows
        mask = away >= 0 if window is None else (away >= 0) & (away < window)
        return [SeenRows(rows=len(keys), keys=keys, values=values, mask=mask)]


@torch.no_grad()
def _shares(head: StateHead, texts: Sequence[CanaryText], target: TargetShape, how: _Rows) -> tuple[int, float, float]:
    """Number of guesses, and the shares of first and second ones that the target chose."""
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    like = head.missing_state
    for text in texts:
        size = len(text.tokens)
        rows = torch.arange(max(0, -how.shift), min(size - 1, size - how.shift, size - 1 - how.ahead))
        states = states_of(text, how.layers, target)[rows + how.shift]
        tokens = text.tokens.to(like.device)
        attend = _Unrolled()
        fused = head.fuse(states.to(like))[None]
        positions = rows[None].to(like.device)
        made = head(head.embed(tokens[rows + 1])[None], fused, positions, attend)
        counted = rows + 1 + how.ahead >= text.answer
        first.append((_guess(head, made.hidden) == tokens[rows + 1 + how.ahead])[counted])
        # The last row has no token behind it.
        attend.go_on()
        following = (rows + 2).clamp(max=size - 1)
        made = head(*head.rows_behind(tokens[following], made.state), positions + 1, attend)
        there = counted & (rows + 2 + how.ahead < size)
        second.append((_guess(head, made.hidden) == tokens[(rows + 2 + how.ahead).clamp(max=size - 1)])[there])
    every = torch.cat(first)
    return len(every), every.double().mean().item(), torch.cat(second).double().mean().item()


def _guess(head: StateHead, hidden: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens [R] of [1, R, h]."""
    vocabulary = head.vocabulary
    return vocabulary.ids.to(hidden.device)[head.logits(hidden, vocabulary)[0].argmax(-1)]


def _explain_first(head: StateHead, texts: Sequence[CanaryText], target: TargetShape, first: float) -> str | None:
    best, words = first, None
    shifts = _shifts(head) if first < DOUBTFUL else ()
    for tried, other, how in (*shifts, *_settings(head, texts, target)):
        share = _shares(other, texts, target, how)[1]
        if share > best and stands_out(share, first):
            best, words = share, f"{tried} ({share:.0%} that way)"
    return words


_Alternative = tuple[str, StateHead, _Rows]


def _shifts(head: StateHead) -> Iterator[_Alternative]:
    """Other rows. A head that does well may do better yet on some of them, which show it more of the text."""
    plain = _Rows(layers=head.state_layers)
    yield "its rows are shifted by one: it wants the state of the token's own position", head, replace(plain, shift=1)
    yield "its rows are shifted by one: it wants the state one position earlier", head, replace(plain, shift=-1)
    yield "its labels are shifted by one: it guesses the token that it is given", head, replace(plain, ahead=0)


def _settings(head: StateHead, texts: Sequence[CanaryText], target: TargetShape) -> Iterator[_Alternative]:
    """Other layers and flags."""
    layers = head.state_layers
    for by in (1, -1):
        # Beside layers that are counted, the last state is not.
        moved = (layer if layer == FINAL and len(layers) > 1 else beside(layer, by, target) for layer in layers)
        others = tuple(other for other in moved if other is not None)
        held = (held_states(text, layer, target) for text in texts for layer in others)
        if len(others) == len(layers) and all(states is not None for states in held):
            said = f"its layers are off by one: it wants the states of {shown_layers(others)}, not of {shown_layers(layers)}"
            if len(layers) > 1:
                said += "; layer_ids in training.json says how they are counted"
            yield said, head, _Rows(layers=others)
    for said, changed in (*head.alternatives(fed_back=False), *_by_the_targets_rope(head, target)):
        yield said, changed, _Rows(layers=layers)


def _by_the_targets_rope(head: StateHead, target: TargetShape) -> Iterator[tuple[str, StateHead]]:
    """Positions as the target turns them, where the head's configuration says something else."""
    if isinstance(head, FeatureHead) and head.config.rope != (own := rope_of(target.config)):
        yield "its rope_parameters must be the target's", head.under(replace(head.config, rope=own))


def _explain_second(head: StateHead, texts: Sequence[CanaryText], target: TargetShape, second: float) -> str | None:
    """Whether another flag that acts on fed back states alone does better, or another rope: first guesses hardly need it."""
    for said, other in (*head.alternatives(fed_back=True), *_by_the_targets_rope(head, target)):
        share = _shares(other, texts, target, _Rows(layers=head.state_layers))[2]
        if stands_out(share, second):
            return f"{said} ({share:.0%} of the second guesses that way)"
    return None
