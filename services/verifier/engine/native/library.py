"""Loads what is compiled for the engine."""

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
    name="engine",
    folder=_HERE,
    shipped=_HERE / "shipped",
    sources=("nodes.c", "trees.c", "commits.c", "walks.c", "check.c"),
    # Contraction is off: the reference rounds after every operation.
    flags=("-O3", "-ffp-contract=off", "-fPIC"),
    links=("-lm",),
)
# As for ``Recipe.functions``.
_SIGNATURES: dict[str, tuple[str, str | None]] = {
    "nodes_rank": ("PPPPqqP", "q"),
    "nodes_probabilities": ("PP", None),
    "nodes_learn": ("PP", None),
    "trees_check": ("PqqP", None),
    "repetition_new": ("q", "P"),
    "repetition_free": ("P", None),
    "repetition_commit": ("PPq", "q"),
    "commits_take": ("P", None),
    "walks_take": ("P", None),
}


@functools.cache
def engine_library() -> ctypes.PyDLL | None:
    """The compiled functions; None if they are not available, which the log explains."""
    try:
        return _RECIPE.functions(_SIGNATURES)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the engine runs without compiled code, each step takes longer: %s", error)
        return None


def ship() -> Path:
    """Compile it into the package, for machines without a compiler; returns the file.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    return _RECIPE.ship()
