"""Compiles the kernels with the machine's own C compiler, half a second at every start, and loads them."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCES = ("linear.c", "tree_attention.c")
_FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they cannot be had, which the log explains: slower layers of torch's do the same then."""
    try:
        return _compile()
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no native kernels, each pass takes longer: %s", error)
        return None


def _compile() -> ctypes.CDLL:
    """Compile in a folder that only we can write to, and leave nothing behind.

    Raises:
        OSError: there is no compiler, or what it makes cannot be loaded.
        SubprocessError: it hangs.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("no C compiler found (cc, or what the environment variable CC names)")
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        objects = []
        for name in _SOURCES:
            objects.append(str(Path(folder) / f"{name}.o"))
            _run([compiler, *_FLAGS, "-c", str(Path(__file__).parent / name), "-o", objects[-1]])
        # Linked without an OpenMP library: they shall run in torch's team, two teams would fight for the cores.
        made = str(Path(folder) / "kernels.so")
        _run([compiler, "-shared", "-nostdlib", *objects, "-o", made])
        return ctypes.CDLL(made, mode=os.RTLD_NOW)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
