"""Which code takes the processor time of a step, by a profiler in the event loop's thread and in the target's."""

from __future__ import annotations

import cProfile
import pstats
from concurrent.futures import Executor
from pathlib import Path
from types import TracebackType
from typing import Any

_ROOT = Path(__file__).parents[2]

# The first that a file's path begins with names its part.
_PARTS = (
    ("services/verifier/engine/deciding", "engine: whom to ask, how long to wait"),
    ("services/verifier/engine/mailbox", "engine: mailboxes"),
    ("services/verifier/engine/drafting", "engine: reports and drafts"),
    ("services/verifier/engine", "engine: the rest"),
    ("services/verifier/choosing", "choosing"),
    ("services/verifier/kernels", "layout of the pass"),
    ("services/verifier/kv_cache", "key-value cache"),
    ("services/links", "codec and links"),
    ("services/drafter/sources", "drafter: sources"),
    ("services/drafter", "drafter: blend, calibrator, sessions"),
    ("speculation", "trees, hashes, budget"),
    ("benchmarks", "the benchmark itself"),
)
_OTHERS = "Python and asyncio"


class Profiled:
    """Profiles the calling thread and the one of ``worker`` during a block."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._profiles = (cProfile.Profile(), cProfile.Profile())

    def __enter__(self) -> Profiled:
        self._worker.submit(self._profiles[1].enable).result()
        self._profiles[0].enable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profiles[0].disable()
        self._worker.submit(self._profiles[1].disable).result()

    def shares(self) -> dict[str, float]:
        """Each part's share of all the time, the largest first. A function of C counts as its callers'."""
        spent: dict[str, float] = {}
        for profile in self._profiles:
            # Functions, (calls, primitive calls, own seconds, seconds with callees, callers).
            entries: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
            for function, (_, _, own_s, _, callers) in entries.items():
                for where, seconds in _places(function, own_s, callers):
                    spent[where] = spent.get(where, 0.0) + seconds
        # The profiled threads wait for each other there.
        whole = sum(spent.values()) or 1.0
        return {name: spent[name] / whole for name in sorted(spent, key=lambda name: -spent[name])}


def _places(function: tuple[str, int, str], own_s: float, callers: dict[Any, Any]) -> list[tuple[str, float]]:
    if function[2] in _WAITING:
        return []
    if function[0] != "~":
        return [(_part_of(function[0]), own_s)]
    # By caller: (calls, primitive calls, own seconds, seconds with callees).
    return [(_part_of(caller[0]), found[2]) for caller, found in callers.items()]


_WAITING = frozenset(
    {"<method 'acquire' of '_thread.lock' objects>", "<method 'poll' of 'select.epoll' objects>"}
    | {"<method 'get' of '_queue.SimpleQueue' objects>"}
)


def _part_of(file: str) -> str:
    try:
        path = Path(file).relative_to(_ROOT).as_posix()
    except ValueError:
        return _OTHERS
    return next((name for begin, name in _PARTS if path.startswith(begin)), _OTHERS)
