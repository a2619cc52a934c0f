"""The canary: before a head serves, it must do what it was trained for, on text that the target wrote itself.

Layers counted in another way, and rows shifted by one position, are the commonest faults of public heads: everything loads,
and next to nothing is accepted. So the share of a head's first guesses that the target had chosen is measured. A useless
head is refused, with the fault that explains it, found by trying.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.drafter.heads.canary.texts import TEXTS, CanaryText, beside, read_texts
from services.drafter.heads.eagle.head import FeatureHead
from services.drafter.heads.files.head_config import FINAL, TargetShape, rope_of
from services.drafter.heads.files.target_rows import read_target_shape
from services.drafter.heads.files.target_shape import recorded_agreement
from services.drafter.heads.layer import SeenRows
from services.drafter.heads.state_head import StateHead
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Share of first guesses accepted: under the one, a head is refused if a fault explains it, and doubted if none does; under
# the other, it is refused.
DOUBTFUL, USELESS = 0.3, 0.05
# Fewest guesses that say anything.
LEAST = 64
# A fault explains what was measured if the head does so much better without it.
_BETTER, _BY = 1.3, 0.15
# Shares that differ by no more say as much.
ALIKE = 0.05
# A weak head is no surprise where it does this much of what its training measured on held-out text.
_AS_RECORDED = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryResult:
    """What a head did on the texts.

    Attributes:
        guesses: how many were counted.
        first: share of first guesses that the target chose.
        second: share of second guesses, on the head's own state, where the first ones' token was the target's.
        likely_fault: what explains a low share, in words; None: nothing that was tried.
    """

    guesses: int
    first: float
    second: float
    likely_fault: str | None = None


# Measures a drafter on texts for a target, at the checkpoint of this name, and refuses a useless one.
Check = Callable[[Sequence[CanaryText], TargetShape, str], CanaryResult]


def check(head: StateHead, texts: Sequence[CanaryText], target: TargetShape, where: str) -> CanaryResult:
    """Measure a head, and log a doubt.

    Args:
        where: the checkpoint, for errors and the log.

    Raises:
        ConfigurationError: the head is useless as it is; says what was measured and the likely fault. Or the texts lack the
            states that the head reads, or are too short to tell.
    """
    return judge(measure(head, texts, target), where)


def judge(result: CanaryResult, where: str) -> CanaryResult:
    """Log a doubt about what was measured, and return it.

    Args:
        where: the checkpoint, for errors and the log.

    Raises:
        ConfigurationError: it is useless, or helps little for a reason that was found; says what was measured and the likely
            fault.
    """
    shares = f"the target chose {result.first:.0%} of the first guesses and {result.second:.0%} of the second ones"
    measured = f"on {result.guesses} tokens of its own text {shares}"
    fault = (
        result.likely_fault
        or "no shift, layer or flag that was tried explains it: trained too little, or for another target"
    )
    if result.first < USELESS:
        raise ConfigurationError(
            f"cannot use the head at {where}: {measured}, which must be {USELESS:.0%} at least: {fault}", about=where
        )
    if result.first < DOUBTFUL and result.likely_fault:
        raise ConfigurationError(f"cannot use the head at {where} as it is set: {measured}: {fault}", about=where)
    recorded = recorded_agreement(Path(where))
    if result.first < DOUBTFUL and recorded is not None and result.first >= _AS_RECORDED * recorded:
        log.info("the head at %s is as good as its training left it, %.0f%%: %s", where, 100 * recorded, measured)
    elif result.first < DOUBTFUL:
        log.warning("the head at %s helps little: %s: %s", where, measured, fault)
    elif result.likely_fault:
        log.warning("the head at %s may be set wrong: %s: %s", where, measured, fault)
    return result


def check_checkpoint(head: StateHead, folder: Path, target: Path, *, asked_for: bool = True) -> CanaryResult | None:
    """``check`` a head on the texts in its checkpoint's folder; None if there are none. Otherwise as ``check_at``."""
    return check_at(folder, target, functools.partial(check, head), asked_for=asked_for)


def check_at(folder: Path, target: Path, trial: Check, *, asked_for: bool) -> CanaryResult | None:
    """Try a drafter on the texts in its checkpoint's folder; None if there are none.

    Args:
        asked_for: whether to refuse a useless one. One that only came along, as the target has the name and the shapes of
            another, is a warning's worth: what it drafts is not accepted, and soon not asked for.

    Raises:
        ConfigurationError: as ``trial``; or the texts cannot be read.
    """
    file = folder / TEXTS
    if not file.is_file():
        log.warning(
            "the head at %s comes without a canary's texts (%s), so no shift or wrong layer would be noticed: "
            "`outrider train canary %s` makes them, and tries it",
            folder,
            TEXTS,
            folder,
        )
        return None
    texts, shape = read_texts(file), read_target_shape(target)
    try:
        return trial(texts, shape, str(folder))
    except ConfigurationError as error:
        if asked_for:
            raise
        log.warning("%s; it came with Outrider: drafter.models: [] leaves it out", error)
        return None


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
    best, words = _least(first), None
    shifts = _shifts(head) if first < DOUBTFUL else ()
    for tried, other, how in (*shifts, *_settings(head, texts, target)):
        share = _shares(other, texts, target, how)[1]
        if share > best:
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


def explanation(first: float, tried: Iterable[tuple[str, float]]) -> str | None:
    """What explains a low share of first guesses, in words. Of two that explain as much, the earlier one.

    Args:
        tried: what would be wrong, and the share if it were so.
    """
    best, words = first, None
    for said, share in tried:
        if share > best + ALIKE and stands_out(share, first):
            best, words = share, said
    return None if words is None else f"{words} ({best:.0%} that way)"


def stands_out(share: float, before: float) -> bool:
    """Whether ``share`` exceeds ``before`` by more than chance, so that the change explains it."""
    return share > _least(before)


def _least(before: float) -> float:
    return max(before * _BETTER, before + _BY)


def shown_layers(layers: Sequence[int]) -> str:
    """Layers in words."""
    return ", ".join("the output layer's input" if layer == FINAL else f"layer {layer}" for layer in layers)


def held_states(text: CanaryText, layer: int, target: TargetShape) -> torch.Tensor | None:
    """[n, h_t], a text's states of a layer; None if it does not hold them."""
    return text.states.get(layer if layer == FINAL else layer % target.num_layers)


def states_of(text: CanaryText, layers: Sequence[int], target: TargetShape) -> torch.Tensor:
    """[n, h_t * layers], a text's states of ``layers``, which it holds."""
    found = [states for layer in layers if (states := held_states(text, layer, target)) is not None]
    assert len(found) == len(layers)
    return torch.cat(found, dim=-1)
