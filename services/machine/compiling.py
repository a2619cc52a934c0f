"""Compiles C once with the machine's compiler, and loads it.

Compiled libraries are kept in the user's cache folder, which nobody else may write to. The name of a file is a digest of
what it was made from: sources, flags, compiler, processor. An image brings compiled ones with it (``Recipe.ship``).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.machine.processor import cache_folder, processor, processor_flags

log = logging.getLogger(__name__)

# Enough for the child to load a library on a busy machine.
_CHECK_S = 60
_COMPILE_S = 300
_CHECK = "import ctypes, os, sys; sys.exit(0 if ctypes.CDLL(sys.argv[1], os.RTLD_LAZY).outrider_check() == 1 else 9)"


# Kinds of arguments and results, see ``Recipe.functions``.
_KINDS = {"P": ctypes.c_void_p, "i": ctypes.c_int32, "q": ctypes.c_int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a library is made from.

    Attributes:
        name: begins the names of shipped files.
        folder: where the sources and their headers are.
        shipped: the folder for compiled code that comes with the package: beside the sources, so that whoever may write
            there could as well change these.
        sources: files in ``folder``; one of them has ``outrider_check``, which returns 1 where the library runs.
        flags: for the compiler.
        links: for the linker.
    """

    name: str
    folder: Path
    shipped: Path
    sources: tuple[str, ...]
    flags: tuple[str, ...]
    links: tuple[str, ...]

    def load(self) -> tuple[ctypes.CDLL, str]:
        """The library that is shipped, or that an earlier start compiled, or a fresh one; and the digest that names it.

        Raises:
            OSError: there is no compiler, or the compiled library cannot be loaded or run here.
            SubprocessError: the compiler or the test run hangs.
        """
        shipped = self._shipped_file()
        if shipped.is_file():
            # Made on another machine.
            check_runs(shipped)
            return _loaded(shipped), shipped.stem
        compiler = _compiler()
        digest = self._digest(compiler)
        kept = private_folder()
        made = None if kept is None else kept / f"{digest}.so"
        if made is None or not made.is_file():
            with tempfile.TemporaryDirectory(prefix="outrider-", dir=kept) as folder:
                fresh = self._compile(compiler, Path(folder))
                check_runs(fresh)
                if made is None:
                    return _loaded(fresh), digest
                fresh.replace(made)
        return _loaded(made), digest

    def functions(self, signatures: Mapping[str, tuple[str, str | None]], *, unlocked: Collection[str] = ()) -> ctypes.PyDLL:
        """The library's functions, called with the interpreter's lock: each takes microseconds, and getting the lock back
        from another thread may take longer.

        Args:
            signatures: by function, its arguments (P: address, i: 32 bits, q: 64 bits) and its result.
            unlocked: those that may last are there once more, as ``NAME_unlocked``: other threads run meanwhile.

        Raises:
            OSError, SubprocessError: as ``load``.
        """
        loaded, _ = self.load()
        functions = ctypes.PyDLL(loaded._name, handle=loaded._handle)
        for name, (arguments, result) in signatures.items():
            for place, library in (("", functions), ("_unlocked", loaded)):
                if place and name not in unlocked:
                    continue
                function = getattr(library, name)
                function.argtypes = [_KINDS[each] for each in arguments]
                function.restype = None if result is None else _KINDS[result]
                setattr(functions, name + place, function)
        return functions

    def ship(self) -> Path:
        """Compile into the package itself; returns the file.

        Raises:
            OSError: there is no compiler, or it fails.
        """
        made = self._shipped_file()
        made.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            return shutil.copyfile(self._compile(_compiler(), Path(folder)), made)

    def _compile(self, compiler: str, folder: Path) -> Path:
        """Compile all sources in parallel to one library in ``folder``."""

        def compile_one(source: str) -> str:
            made = str(folder / f"{source}.o")
            _run([compiler, *self.flags, "-c", str(self.folder / source), "-o", made])
            return made

        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(compile_one, self.sources))
        made = folder / "compiled.so"
        _run([compiler, "-shared", *objects, *self.links, "-o", str(made)])
        return made

    def _digest(self, compiler: str) -> str:
        """Hash of everything that the compiled library depends on."""
        stat = os.stat(compiler)
        parts = [self.name, *self.flags, *self.links, compiler, str(stat.st_size), str(stat.st_mtime_ns), processor()]
        parts += [",".join(sorted(processor_flags()))]
        return hashlib.sha256("\0".join(parts).encode() + self._contents()).hexdigest()[:32]

    def _shipped_file(self) -> Path:
        """Where the library is that was shipped for these very sources and flags, if there is one."""
        parts = "\0".join([self.name, *self.flags, *self.links])
        digest = hashlib.sha256(parts.encode() + self._contents()).hexdigest()[:32]
        return self.shipped / f"{self.name}-{digest}.so"

    def _contents(self) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(self.folder.glob("*.[ch]")))


def private_folder() -> Path | None:
    """The folder for compiled libraries; None unless only this user can write to it, since its content is executed."""
    folder = cache_folder() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        stat = folder.stat()
    except OSError:
        return None
    if stat.st_uid != os.getuid() or stat.st_mode & 0o022 or not os.access(folder, os.W_OK):
        log.warning("C is compiled at every start: %s is not a folder that this user alone can write to", folder)
        return None
    return folder


def check_runs(made: Path) -> None:
    """Run a library in a child process, because a missing instruction kills the process that meets it.

    Raises:
        OSError: the library does not run here, or computes something else.
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _CHECK, str(made)], timeout=_CHECK_S, check=False)
    if done.returncode:
        raise OSError(f"what the compiler makes does not run on this processor (exit status {done.returncode})")


def _compiler() -> str:
    command = os.environ.get("CC", "cc")
    found = shutil.which(command)
    if found is None:
        raise OSError(f"no C compiler found ({command}, which the environment variable CC can change)")
    return found


def _loaded(made: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(made), mode=os.RTLD_NOW)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
