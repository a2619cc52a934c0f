"""The canary: before a drafter serves, it must do what it was trained for, on text that the target wrote itself.

The share of its guesses that the target had chosen is measured (``heads``, ``levels``, ``noise``). A useless drafter is
refused, with the fault that explains it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.drafter.heads.canary.texts import TEXTS, CanaryText, read_texts
from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.target_rows import read_target_shape
from services.drafter.heads.files.target_shape import recorded_agreement
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
    return share > max(before * _BETTER, before + _BY)
