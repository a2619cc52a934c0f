"""Compiles the kernels once with the machine's C compiler, and loads them.

Compiled libraries are kept in the user's cache folder, which nobody else may write to. The name of a file is a digest of
what it was made from: sources, flags, compiler, processor. An image brings compiled ones with it (``ship.py``).
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
# Beside the sources, so that whoever may write there could as well change this code.
_SHIPPED = _HERE / "shipped"
_SOURCES = ("linear.c", "layer.c", "tree_attention.c", "choose.c", "likeliest.c", "pass_meta.c", "check.c")
# Contraction is off: fused multiply-adds are written explicitly, or compilers and processors would round differently.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC")
_FLAGS_OF = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": ("-march=armv8-a",),
}
# Required processor features, by their names in /proc/cpuinfo.
_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": set[str](),
}
_MACHINES = {"avx512": ("x86_64", "AMD64"), "avx2": ("x86_64", "AMD64"), "neon": ("aarch64", "arm64")}
# Enough for the child to load a library on a busy machine.
_CHECK_S = 60
_COMPILE_S = 300
_CHECK = "import ctypes, os, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1], os.RTLD_LAZY).outrider_check() == 1 else 9)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """Compiled kernels.

    Attributes:
        name: instruction set: avx512, avx2 or neon.
        digest: hash of sources, flags, compiler and processor.
        functions: the loaded library.
    """

    name: str
    digest: str
    functions: ctypes.CDLL


def instruction_sets() -> list[str]:
    """Instruction sets that this processor reports, widest vectors first."""
    flags = processor_flags()
    fitting = [name for name, machines in _MACHINES.items() if platform.machine() in machines]
    # If features are unknown, all candidates are returned, and a test run decides.
    return [name for name in fitting if not flags or _NEEDS[name] <= flags]


@functools.cache
def library(name: str = "auto") -> Library | None:
    """The kernels; None if they are not available, which the log explains. torch's slower layers are used then.

    Args:
        name: an instruction set, or ``auto``: the first one that can be compiled and runs.
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
    """Load the library that is shipped, or that an earlier start compiled, or compile it.

    Raises:
        OSError: there is no compiler, or the compiled library cannot be loaded or run here.
        SubprocessError: the compiler or the test run hangs.
    """
    shipped = _shipped_file(name)
    if shipped.is_file():
        # Made on another machine.
        _check_runs(shipped)
        return Library(name=name, digest=shipped.stem, functions=ctypes.CDLL(str(shipped), mode=os.RTLD_NOW))
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
    """Hash of everything that the compiled library depends on."""
    stat = os.stat(compiler)
    parts = [name, *_FLAGS, *_FLAGS_OF[name], compiler, str(stat.st_size), str(stat.st_mtime_ns), processor()]
    parts += [",".join(sorted(processor_flags()))]
    return hashlib.sha256("\0".join(parts).encode() + _sources()).hexdigest()[:32]


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.[ch]")))


def _shipped_file(name: str) -> Path:
    """Where the library is that was shipped for these very sources and flags, if there is one."""
    parts = "\0".join([name, *_FLAGS, *_FLAGS_OF[name]])
    return _SHIPPED / f"{name}-{hashlib.sha256(parts.encode() + _sources()).hexdigest()[:32]}.so"


def ship() -> list[Path]:
    """Compile for every instruction set that machines of this kind may have, into the package itself.

    Returns:
        The files.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    compiler = shutil.which(command := os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError(f"no C compiler found ({command}, which the environment variable CC can change)")
    _SHIPPED.mkdir(exist_ok=True)
    made = []
    for name in (name for name, machines in _MACHINES.items() if platform.machine() in machines):
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            made.append(shutil.copyfile(_compile(compiler, _FLAGS_OF[name], Path(folder)), _shipped_file(name)))
    return made


def _private_folder() -> Path | None:
    """The folder for compiled kernels; None unless only this user can write to it, since its content is executed."""
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
    """Compile all sources in parallel to one library in ``folder``."""

    def compile_one(source: str) -> str:
        made = str(folder / f"{source}.o")
        _run([compiler, *_FLAGS, *flags, "-c", str(_HERE / source), "-o", made])
        return made

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, _SOURCES))
    # Linked without an OpenMP library, so that the kernels use torch's threads; two pools would compete for the cores.
    made = folder / "kernels.so"
    _run([compiler, "-shared", "-nostdlib", "-Wl,-z,lazy", *objects, "-o", str(made)])
    return made


def _check_runs(made: Path) -> None:
    """Run the library in a child process, because a missing instruction kills the process that meets it.

    Raises:
        OSError: the library does not run here, or computes something else.
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _CHECK, str(made)], timeout=_CHECK_S, check=False)
    if done.returncode:
        raise OSError(f"what the compiler makes does not run on this processor (exit status {done.returncode})")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
