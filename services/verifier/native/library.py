"""Compiles the kernels with the machine's own C compiler, once, and loads them.

What was compiled is kept in the user's cache folder, which nobody else may write to; the name of a file there stands for
what it was made of: sources, flags, compiler, processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.machine import cache_folder, processor, processor_flags

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_SOURCES = ("linear.c", "layer.c", "tree_attention.c", "check.c")
# Contraction is off: what is a fused multiply-add says so, or compilers and processors would round differently.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC")
_FLAGS_OF = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": ("-march=armv8-a",),
}
# What /proc/cpuinfo calls what they need.
_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": set[str](),
}
_MACHINES = {"avx512": ("x86_64", "AMD64"), "avx2": ("x86_64", "AMD64"), "neon": ("aarch64", "arm64")}
# The child must live long enough to load a library, on a machine that is busy.
_CHECK_S = 60
_COMPILE_S = 300
_CHECK = "import ctypes, os, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1], os.RTLD_LAZY).outrider_check() == 1 else 9)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """Compiled kernels.

    Attributes:
        name: of the instruction set: avx512, avx2 or neon.
        digest: of what they were made of.
    """

    name: str
    digest: str
    functions: ctypes.CDLL


def instruction_sets() -> list[str]:
    """Those that this processor says it has, the widest vectors first."""
    flags = processor_flags()
    fitting = [name for name, machines in _MACHINES.items() if platform.machine() in machines]
    # Where nothing says what the processor has, running a few instructions will.
    return [name for name in fitting if not flags or _NEEDS[name] <= flags]


@functools.cache
def library(name: str = "auto") -> Library | None:
    """The kernels; None where they cannot be had, which the log explains: slower layers of torch's do the same then.

    Args:
        name: of an instruction set, or ``auto``: the first one that can be compiled and that runs.
    """
    names = instruction_sets() if name == "auto" else [name]
    if not names:
        log.warning("no native kernels, each pass takes longer: this processor has neither AVX-512, AVX2 with FMA nor NEON")
    for candidate in names:
        try:
            return _load(candidate)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("no native kernels for %s, each pass takes longer: %s", candidate, error)
    return None


def _load(name: str) -> Library:
    """Load what an earlier start has left, or compile.

    Raises:
        OSError: there is no compiler, or what it makes cannot be loaded or run here.
        SubprocessError: it hangs.
    """
    command = os.environ.get("CC", "cc")
    compiler = shutil.which(command)
    if compiler is None:
        raise OSError(f"no C compiler found ({command}, which the environment variable CC can change)")
    digest = _digest(name, compiler)
    kept = _private_folder()
    made = None if kept is None else kept / f"{digest}.so"
    if made is None or not made.is_file():
        with tempfile.TemporaryDirectory(prefix="outrider-", dir=kept) as folder:
            fresh = _compile(compiler, _FLAGS_OF[name], Path(folder))
            _check_runs(fresh)
            if made is None:
                return Library(name=name, digest=digest, functions=ctypes.CDLL(str(fresh), mode=os.RTLD_NOW))
            fresh.replace(made)
    return Library(name=name, digest=digest, functions=ctypes.CDLL(str(made), mode=os.RTLD_NOW))


def _digest(name: str, compiler: str) -> str:
    """Of everything that what is compiled depends on."""
    stat = os.stat(compiler)
    parts = [name, *_FLAGS, *_FLAGS_OF[name], compiler, str(stat.st_size), str(stat.st_mtime_ns), processor()]
    parts += [",".join(sorted(processor_flags()))]
    content = b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.[ch]")))
    return hashlib.sha256("\0".join(parts).encode() + content).hexdigest()[:32]


def _private_folder() -> Path | None:
    """Where compiled kernels are kept: a folder of ours that nobody else can write to, since what lies there is run."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stat = folder.stat()
    except OSError:
        return None
    if stat.st_uid != os.getuid() or stat.st_mode & 0o022 or not os.access(folder, os.W_OK):
        log.warning("kernels are compiled at every start: %s is not a folder that this user alone can write to", folder)
        return None
    return folder


def _compile(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """Compile all sources, side by side, to one library in ``folder``."""

    def compile_one(source: str) -> str:
        made = str(folder / f"{source}.o")
        _run([compiler, *_FLAGS, *flags, "-c", str(_HERE / source), "-o", made])
        return made

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, _SOURCES))
    # Linked without an OpenMP library: they shall run in torch's team, two teams would fight for the cores.
    made = folder / "kernels.so"
    _run([compiler, "-shared", "-nostdlib", "-Wl,-z,lazy", *objects, "-o", str(made)])
    return made


def _check_runs(made: Path) -> None:
    """A processor that lacks an instruction kills whoever meets it: that shall be a child of ours.

    Raises:
        OSError: what was compiled does not run here, or computes something else.
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _CHECK, str(made)], timeout=_CHECK_S, check=False)
    if done.returncode:
        raise OSError(f"what the compiler makes does not run on this processor (exit status {done.returncode})")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
