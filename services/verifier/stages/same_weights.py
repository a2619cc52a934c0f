"""Tells whether the processes of a target read the same weights: the very same files, or files with the same bytes.

Those of one machine mostly read the same files, which is told by their inodes. One that reads others, such as a copy on
another machine, compares config.json with the verifier's before it loads, and of each weight file the size, the header and
the ends. It hashes what it loads while it loads it, and the verifier then hashes the same parts of its own files. So no
machine reads a byte twice for it, and every number that a process computes by is one of the verifier's files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from services.model_files.folder import reading, weights_digest
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import BLOCKS_FILE, weight_files
from services.model_files.weights.noted_reads import NotedReads, StoredPiece, noting_reads
from speculation.errors import ConfigurationError

R = TypeVar("R")

_MACHINE = Path("/proc/sys/kernel/random/boot_id")
_CONFIG = "config.json"
# Bytes behind the header and at the end that tell a weight file from others; and of a header that are read at most.
_END, _MOST_HEADER = 1 << 16, 100_000_000


def files_told(folder: Path) -> str:
    """Tells these files on this machine, as they are, from all others; in milliseconds.

    Returns:
        JSON: what tells the files, and of each by name what tells its content, as far as that is seen so soon.

    Raises:
        ConfigurationError: a file cannot be read, or there are no weights.
    """
    places = _places(folder)
    with reading(f"read the model at {folder}", about=folder):
        contents = {_CONFIG: hashlib.sha256((folder / _CONFIG).read_bytes()).hexdigest()}
        contents |= {file.name: _outline(file) for file in _weights(folder)}
    return json.dumps({"places": places, "contents": contents})


def _weights(folder: Path) -> list[Path]:
    blocks = folder / BLOCKS_FILE
    return [blocks] if blocks.is_file() else sorted(weight_files(folder))


def _places(folder: Path) -> str:
    """Tells these files on this machine by what the file system says of them."""
    weights = _weights(folder)
    with reading(f"read the model at {folder}", about=folder):
        places = [_MACHINE.read_text().strip() if _MACHINE.is_file() else ""]
        for file in (folder / _CONFIG, *weights):
            about = file.stat()
            places.append(f"{file.name}:{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}")
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


def _untouched(folder: Path, told: str) -> bool:
    """Whether the files in a folder are those of their ``files_told``, and nobody has touched one since."""
    return bool(json.loads(told)["places"] == _places(folder))


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesRead:
    """The files that weights were read from.

    Attributes:
        told: their ``files_told``, as they were read; empty: none have been read.
        digest: of every byte of them; empty: not known.
    """

    told: str = ""
    digest: str = ""

    def same_in(self, folder: Path, told: str) -> bool:
        """Whether the files in a folder, which ``told`` tells now, have the same bytes: touched ones have.

        Raises:
            ConfigurationError: as ``files_told``.
        """
        if self.told in ("", told):
            return True
        return bool(self.digest) and weights_digest(folder) == self.digest

    def noted(self, folder: Path, digest: str) -> FilesRead:
        """The same with the digest of the bytes in a folder, if nobody has touched a file there since it was read.

        Raises:
            ConfigurationError: as ``files_told``.
        """
        return replace(self, digest=digest) if self.told and _untouched(folder, self.told) else self


NOTHING_READ = FilesRead()


def _outline(file: Path) -> str:
    """A hash of a weight file's size, header and ends."""
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(8)
        digest = hashlib.sha256(f"{size}:".encode() + start)
        digest.update(content.read(min(int.from_bytes(start, "little"), _MOST_HEADER) + _END))
        content.seek(max(0, size - _END))
        digest.update(content.read(_END))
    return digest.hexdigest()


def read_as_told(folder: Path, theirs: str, read: Callable[[], R]) -> tuple[R, str]:
    """What another process than the verifier reads from a folder.

    Args:
        theirs: the verifier's ``files_told``.
        read: reads it, in this thread, by ``WeightFiles``.

    Returns:
        What ``read`` returns, and what the verifier is told: ``theirs``, if these are the same files; otherwise in JSON a
        digest of each piece that was read.

    Raises:
        ConfigurationError: the files are seen to be others before anything is read, or have changed meanwhile; names one.
    """
    if (own := files_told(folder)) != theirs:
        _check_outlines(folder, own, theirs)
        with noting_reads() as noted:
            made = read()
        return made, json.dumps([[*piece, digest] for piece, digest in noted.digests.items()])
    made = read()
    if not _untouched(folder, theirs):
        raise ConfigurationError(f"the files in {folder} have changed while they were read", about=folder)
    return made, theirs


def _check_outlines(folder: Path, own: str, theirs: str) -> None:
    ours, others = _contents(own), _contents(theirs)
    differing = [name for name in sorted(ours.keys() | others.keys()) if ours.get(name) != others.get(name)]
    if not differing:
        return
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    raise ConfigurationError(
        f"{differing[0]}{more} in {folder} differs from the verifier's: copy the model's folder to this machine again",
        about=folder,
    )


def _contents(told: str) -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads(told)["contents"]
    return found


class OwnFiles:
    """The verifier's files, which say what other processes should have read.

    Raises:
        ConfigurationError: as ``files_told``.

    Attributes:
        told: their ``files_told``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.told = folder, files_told(folder)
        # What several processes read is hashed here once.
        self._digests: dict[StoredPiece, str] = {}

    def check(self, process: str, told: str) -> None:
        """Check what a process says that it has read.

        Args:
            process: what errors call it.
            told: see ``read_as_told``.

        Raises:
            ConfigurationError: a tensor has other bytes here; names it and its file.
        """
        if told == self.told:
            return
        theirs = {StoredPiece(*piece): digest for *piece, digest in json.loads(told)}
        with noting_reads() as noted, WeightFiles(self._folder) as files:
            self._hash(theirs, noted, files)
            differing = [piece.name for piece, digest in theirs.items() if self._digests[piece] != digest]
            if not differing:
                return
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            where = files.file_of(differing[0])
        raise ConfigurationError(
            f"{process} has other numbers than the verifier in {differing[0]}{more} ({where.name}): copy the model's folder "
            "to its machine again",
            about="model",
        )

    def _hash(self, pieces: Mapping[StoredPiece, str], noted: NotedReads, files: WeightFiles) -> None:
        with reading(f"read the model at {self._folder}", about=self._folder):
            for piece in pieces:
                if piece not in self._digests:
                    files.stored(piece)
        self._digests |= noted.digests
