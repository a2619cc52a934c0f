"""Our kernels for the instruction sets that this processor has.

Those of others are not asked for: they would be compiled for half a minute in each process, and thrown away since they do not run.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.verifier.kernels.native import library as compiling
from services.verifier.kernels.native.library import Library, instruction_sets, library

SOURCES = Path(compiling.__file__).parent
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


def planted_kernels(source: str, fault: tuple[str, str], folder: Path, *, beside: Sequence[str] = ()) -> Library:
    """The kernels of one source file with a fault planted; skips the test where nothing can be compiled or run.

    Args:
        fault: what is right, which stands there once, and what stands in its place.
        beside: other source files whose kernels are looked for as well.
    """
    compiler = shutil.which("cc")
    if compiler is None or not SETS or library(SETS[-1]) is None:
        pytest.skip("nothing can be compiled or run here")
    text = (SOURCES / source).read_text()
    assert text.count(fault[0]) == 1
    (folder / source).write_text(text.replace(*fault))
    made, files = str(folder / "wrong.so"), [str(folder / source), *(str(SOURCES / each) for each in beside)]
    flags = [*compiling._FLAGS, *compiling._FLAGS_OF[SETS[-1]], "-O1", f"-I{SOURCES}", "-shared", "-nostdlib"]
    subprocess.run([compiler, *flags, *files, "-o", made], check=True)
    return Library(name=SETS[-1], digest="", functions=ctypes.CDLL(made))
