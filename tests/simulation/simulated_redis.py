"""Redis as ``IndexStore`` speaks to it: the versions of an index, in memory. Commands may fail or take long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import redis

from retrieval_index.manifest import read_manifest
from tests.simulation.fault_points import FaultPoints
from tests.simulation.virtual_loop import VirtualLoop

_SLOW_S = 1.0
_Result = TypeVar("_Result")


class SimulatedRedis:
    """Stands for ``redis.Redis``, for one index named "default".

    Attributes:
        down: commands fail, as while Redis restarts or cannot be reached.
    """

    def __init__(self, loop: VirtualLoop, faults: FaultPoints) -> None:
        self._loop, self._faults = loop, faults
        self._values: dict[str, bytes] = {}
        self._history: list[bytes] = []
        self._changes = 0
        self.down = False

    def publish(self, folder: Path) -> str:
        """Make a folder's index the live version, as ``IndexStore.publish`` leaves it; returns the version."""
        manifest = read_manifest(folder)
        version = manifest.version
        self._values[_key("manifest", version)] = manifest.to_json().encode()
        for name in manifest.parts:
            self._values[_key("part", version, name, "0")] = (folder / name).read_bytes()
        self._values[_key("live")] = version.encode()
        self._history = [version.encode(), *(each for each in self._history if each != version.encode())][:2]
        self._changes += 1
        return version

    def get(self, key: str) -> bytes | None:
        return self._answered(lambda: self._values.get(key))

    def lrange(self, key: str, start: int, end: int) -> list[bytes]:
        return self._answered(lambda: self._history[start : end + 1])

    def xrevrange(self, key: str, count: int) -> list[tuple[bytes, object]]:
        return self._answered(lambda: [(str(self._changes).encode(), {})] if self._changes else [])

    def xread(self, after: dict[str, str], block: int) -> list[tuple[bytes, list[tuple[bytes, object]]]]:
        (seen,) = after.values()

        def changed() -> list[tuple[bytes, list[tuple[bytes, object]]]]:
            if self._changes > int(seen):
                return [(b"changes", [(str(self._changes).encode(), {})])]
            self._loop.blocked_s += block / 1000
            return []

        return self._answered(changed)

    def scan_iter(self, pattern: str, count: int) -> Iterator[bytes]:
        return iter([key.encode() for key in self._values if key.startswith(pattern.rstrip("*"))])

    def close(self) -> None:
        pass

    def _answered(self, command: Callable[[], _Result]) -> _Result:
        if self.down or self._faults.fires("redis: a command fails"):
            raise redis.exceptions.ConnectionError("a planted failure")
        if self._faults.fires("redis: a command is slow"):
            self._loop.blocked_s += _SLOW_S
        return command()


def _key(*parts: str) -> str:
    return ":".join(("outrider:{default}", *parts))
