"""Our kernels for the instruction sets that this processor has.

Those of others are not asked for: they would be compiled for half a minute in each process, and thrown away since they do not run.
"""

from __future__ import annotations

import pytest

from services.verifier.kernels.native.library import Library, instruction_sets, library

SETS = tuple(instruction_sets())
# For tests of what our kernels alone compute.
needs_kernels = pytest.mark.skipif(library() is None, reason="no kernels of our own can be compiled or run here")


def kernels_of(instructions: str) -> Library:
    """The kernels for an instruction set; skips the test where they cannot be compiled or run."""
    found = library(instructions)
    if found is None:
        pytest.skip(f"{instructions} cannot be compiled or run here")
    return found


def all_here() -> list[Library]:
    """Those of every instruction set that can be compiled and run here."""
    return [found for name in SETS if (found := library(name)) is not None]
