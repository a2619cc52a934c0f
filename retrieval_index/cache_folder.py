"""Versions of an index in a cache folder, each in a folder of its own."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from retrieval_index.manifest import FILE, Manifest, verify
from speculation.errors import ConfigurationError, Unavailable

# Suffix of the folder that a version is fetched into. A replica that dies during a fetch leaves the folder behind.
PARTIAL = ".partial"
_PARTIAL_S = 6 * 3600.0
_VERSION = re.compile("[0-9a-f]{16}")


def is_whole(folder: Path, version: str) -> bool:
    """Whether ``folder`` holds this version, with every checksum right.

    Raises:
        Unavailable: what is there cannot be read, so that nobody knows.
    """
    try:
        manifest = Manifest.from_json((folder / FILE).read_bytes(), str(folder))
        verify(folder, manifest)
    except (FileNotFoundError, NotADirectoryError, ConfigurationError):
        return False
    except OSError as error:
        raise Unavailable(f"{folder} cannot be read ({error.strerror})") from error
    return manifest.version == version


def prune(cache: Path, keep: Collection[str]) -> None:
    """Delete all versions but ``keep`` from a cache folder, and partial fetches older than six hours.

    A replica that has mapped a deleted version can go on using it.
    """
    for folder in cache.iterdir():
        partial = folder.suffix == PARTIAL and folder.stat().st_mtime < time.time() - _PARTIAL_S
        if partial or (_VERSION.fullmatch(folder.name) and folder.name not in keep):
            shutil.rmtree(folder, ignore_errors=True)
