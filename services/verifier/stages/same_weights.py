"""Tells whether the processes of a target read the same weights: the very same files, or files with the same bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from services.model_files.folder import model_fingerprint, reading, weights_digest

_MACHINE = Path("/proc/sys/kernel/random/boot_id")


def files_told(folder: Path) -> str:
    """Tells these files on this machine, as they are, from all others; in milliseconds.

    Raises:
        ConfigurationError: a file cannot be read, or there are no weights.
    """
    told = [model_fingerprint(folder), _MACHINE.read_text().strip() if _MACHINE.is_file() else ""]
    with reading(f"read the model at {folder}", about=folder):
        for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
            about = file.stat()
            told.append(f"{file.name}:{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}")
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


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


NOTHING_READ = FilesRead()


def weights_told(folder: Path, theirs: str) -> str:
    """What a process tells the verifier of its weights.

    Args:
        theirs: the verifier's ``files_told``.

    Returns:
        The same, if these are the same files; otherwise a digest of every byte.

    Raises:
        ConfigurationError: as ``files_told``.
    """
    own = files_told(folder)
    return own if own == theirs else weights_digest(folder)
