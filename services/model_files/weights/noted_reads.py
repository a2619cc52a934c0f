"""Hashes what is read of weight files while it is read, so that processes can compare it without reading it once more."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from services.machine.held_variable import held
from services.machine.processor import cores

# Bytes that one thread hashes at a time.
_PART = 8 << 20


class StoredPiece(NamedTuple):
    """What is read of a stored tensor: what lies from ``begin`` to before ``end`` along ``axis``; all, if ``end`` is -1."""

    name: str
    axis: int = 0
    begin: int = 0
    end: int = -1


class NotedReads:
    """Attributes:
    digests: of type, shape and bytes of each piece that was read.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.digests: dict[StoredPiece, str] = {}
        self._threads = threads

    def note(self, piece: StoredPiece, read: torch.Tensor) -> None:
        """Hash a piece, once. Its pages are read from the disk here; who needs them next finds them in memory."""
        if piece in self.digests:
            return
        content = read.contiguous().flatten().view(torch.uint8).numpy().data
        parts = (content[at : at + _PART] for at in range(0, len(content), _PART))
        found = hashlib.sha256(f"{read.dtype} {list(read.shape)}".encode())
        for digest in self._threads.map(lambda part: hashlib.sha256(part).digest(), parts):
            found.update(digest)
        self.digests[piece] = found.hexdigest()


_NOTING: ContextVar[NotedReads | None] = ContextVar("noting", default=None)


@contextmanager
def noting_reads() -> Iterator[NotedReads]:
    """Note what this thread reads by ``WeightFiles`` that are opened in the block."""
    with ThreadPoolExecutor(cores(), thread_name_prefix="hash") as threads:
        noted = NotedReads(threads)
        with held(_NOTING, noted):
            yield noted


def noted_here() -> NotedReads | None:
    """Where reads of this thread are noted; None: they are not."""
    return _NOTING.get()
