"""Loads the text drafters' compiled code."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from pathlib import Path

from services.machine.compiling import Recipe

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_RECIPE = Recipe(
    name="drafting",
    folder=_HERE,
    shipped=_HERE / "shipped",
    sources=("automaton.c", "contexts.c", "blend.c", "steps.c", "check.c"),
    # Contraction is off: the reference rounds after every operation.
    flags=("-O3", "-ffp-contract=off", "-fPIC"),
    links=("-lm",),
)
# As for ``Recipe.functions``.
_SIGNATURES = {
    "automaton_new": ("i", "P"),
    "automaton_free": ("P", None),
    "automaton_add": ("PPqP", "q"),
    "automaton_remove": ("PPq", None),
    "automaton_find": ("PiiPq", "q"),
    "automaton_shortened": ("Pii", "i"),
    "automaton_shorter": ("Pi", "i"),
    "automaton_states": ("P", "i"),
    "automaton_count": ("Pi", "i"),
    "automaton_followers": ("PiP", "q"),
    "table_new": ("q", "P"),
    "table_free": ("P", None),
    "table_observe": ("PPPqqqq", "i"),
    "table_read": ("PPPq", None),
    "table_top": ("PPiP", "q"),
    "table_seen": ("PPi", "i"),
    "blend_new": ("", "P"),
    "blend_free": ("P", None),
    "blend_draft": ("PPPPPP", "q"),
    "blend_learn": ("PPqPP", None),
    "blend_candidates": ("PiPP", "q"),
    "session_new": ("", "P"),
    "session_free": ("P", None),
    "steps_ready": ("PPqP", None),
    "steps_take": ("PPqPP", "q"),
    "suffix_candidates": ("PPiiiiiiPq", "q"),
    "recycling_candidates": ("PPPq", "q"),
}


@functools.cache
def drafting_library() -> ctypes.PyDLL | None:
    """The compiled functions; None if they are not available, which the log explains."""
    try:
        return _RECIPE.functions(_SIGNATURES, unlocked=("steps_take",))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no compiled drafters, each draft takes longer: %s", error)
        return None


def ship() -> Path:
    """Compile it into the package, for machines without a compiler; returns the file.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    return _RECIPE.ship()
