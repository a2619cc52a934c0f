"""The kernels, compiled for the instruction sets of this machine's processor."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from services.machine.compiling import Recipe
from services.machine.processor import processor_flags

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_SHIPPED = _HERE / "shipped"
_SOURCES = (
    "linear.c", "packing.c", "low_rank.c", "layer.c", "tree_attention.c", "keyed_states.c", "convolved_rows.c",
    "vector_steps.c", "choose.c", "likeliest.c", "pass_meta.c", "check.c",
)  # fmt: skip
# Contraction is off: fused multiply-adds are written explicitly, or compilers and processors would round differently.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC")
_FLAGS_OF = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "neon": ("-march=armv8-a",),
}
# Linked without an OpenMP library, so that the kernels use torch's threads; two pools would compete for the cores.
_LINKS = ("-nostdlib", "-Wl,-z,lazy")
# Required processor features, by their names in /proc/cpuinfo.
_NEEDS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon": set[str](),
}
# Why there are none, by the name that was asked for.
_LACKING: dict[str, str] = {}
_MACHINES = {"avx512": ("x86_64", "AMD64"), "avx2": ("x86_64", "AMD64"), "neon": ("aarch64", "arm64")}


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


def instructions() -> str:
    """What a measurement on this machine says of its kernels: the instruction set that they use unless told otherwise."""
    return next(iter(instruction_sets()), "no kernels of our own")


def instruction_sets() -> list[str]:
    """Instruction sets that this processor reports, widest vectors first."""
    flags = processor_flags()
    # If features are unknown, all candidates are returned, and a test run decides.
    return [name for name in _of_this_kind() if not flags or _NEEDS[name] <= flags]


@functools.cache
def library(name: str = "auto") -> Library | None:
    """The kernels; None if they are not available, which the log explains. torch's slower layers are used then.

    Args:
        name: an instruction set, or ``auto``: the first one that can be compiled and runs.
    """
    names = instruction_sets() if name == "auto" else [name]
    lacking = [] if names else ["this processor has neither AVX-512, AVX2 with FMA nor NEON"]
    for candidate in names:
        try:
            functions, digest = _recipe(candidate).load()
        except (OSError, subprocess.SubprocessError) as error:
            lacking.append(f"{candidate}: {error}")
        else:
            return Library(name=candidate, digest=digest, functions=functions)
    _LACKING[name] = "; ".join(lacking)
    log.warning("no native kernels, each pass takes longer and weights of few bits become floats: %s", _LACKING[name])
    return None


def why_none() -> str:
    """Why ``library`` gives none, on one line; empty: it gives one, or this process has not imported torch, whose team of
    threads kernels are linked to, and cannot tell.
    """
    if "torch" not in sys.modules or library() is not None:
        return ""
    return " ".join(_LACKING["auto"].split())


def ship() -> list[Path]:
    """Compile for every instruction set that machines of this kind may have, into the package itself.

    Returns:
        The files.

    Raises:
        OSError: there is no compiler, or it fails.
    """
    return [_recipe(name).ship() for name in _of_this_kind()]


def _of_this_kind() -> list[str]:
    return [name for name, machines in _MACHINES.items() if platform.machine() in machines]


def _recipe(name: str) -> Recipe:
    flags = (*_FLAGS, *_FLAGS_OF[name])
    return Recipe(name=name, folder=_HERE, shipped=_SHIPPED, sources=_SOURCES, flags=flags, links=_LINKS)
