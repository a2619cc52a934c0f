"""Files that are replaced while they are in use, such as certificates: read anew once the new ones fit together."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

# Seconds between looks for a change.
LOOK_S = 5.0


class RenewedFiles:
    """The content of some files. May be used from any thread.

    Args:
        mismatch: why the files, as they are now, do not fit together; None: they do.

    Raises:
        OSError: they cannot be read.
    """

    def __init__(self, files: Sequence[Path], mismatch: Callable[[], str | None]) -> None:
        self._files = files
        self._mismatch = mismatch
        self._lock = threading.Lock()
        self._stamp = self._stat()
        self._content = self._read()

    def content(self) -> tuple[tuple[bytes, ...], bool]:
        """What the files hold, in their order, and whether that has changed since the last call."""
        with self._lock:
            try:
                if (stamp := self._stat()) == self._stamp:
                    return self._content, False
                # A certificate whose key is still being written belongs to nothing: stay with the last good pair.
                if (wrong := self._mismatch()) is not None:
                    log.warning("the changed %s is not used yet: %s", self._files[0], wrong)
                    return self._content, False
                self._content, self._stamp = self._read(), stamp
            except (OSError, ValueError) as error:
                log.warning("%s cannot be read: %s", self._files[0], error)
                return self._content, False
            log.info("read the renewed %s", self._files[0])
            return self._content, True

    async def renewed(self) -> None:
        """Wait until the content has changed."""
        first, _ = self.content()
        while True:
            await asyncio.sleep(LOOK_S)
            if self.content()[0] != first:
                return

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        stats = [file.stat() for file in self._files]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in stats)

    def _read(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files)
