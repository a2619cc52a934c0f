"""Token recycling: what the target held likely the last time it saw a token (Luo et al., 2024, arXiv 2408.08696).

Every pass shows the likeliest ids after each verified node, rejected ones too. The table keeps them, the last word counts.
The paper's table goes by the last token; here the last two and three are asked first, where they have been seen together.
What was likely one or two tokens ago and did not come often comes now.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from services.drafter.config import DrafterConfig, RecyclingConfig
from speculation.messages import OpenSession, StepReport
from speculation.successor_table import Successors, read
from speculation.tree import ROOT
from speculation.types import Observation

NAME = "recycling"

_ORDERS = (3, 2, 1)
# How likely the first, second, ... successor comes next, by the length of the context (measured on a small chat model;
# a beginning, until it is learnt).
_BY_ORDER = {
    3: (0.67, 0.09, 0.04, 0.022, 0.015, 0.012, 0.011, 0.01),
    2: (0.37, 0.1, 0.045, 0.034, 0.02, 0.015, 0.012, 0.01),
    1: (0.2, 0.08, 0.04, 0.035, 0.02, 0.015, 0.012, 0.011),
}
_RANKS = len(_BY_ORDER[1])
# The same of what was passed over at the last token, and at the one before.
_PASSED_OVER = ((0.026, 0.016, 0.014, 0.011, 0.008, 0.007), (0.02, 0.012, 0.006, 0.005, 0.004, 0.004))
_BY_SEEN = (0.05, 0.075, 0.2, 0.67)
_KINDS = {order: tuple(f"top:{order}:{rank}" for rank in range(_RANKS)) for order in _ORDERS}
_SEEN = tuple(f"seen:{order}" for order in range(max(_ORDERS) + 1))
_PASSED = tuple(tuple(f"passed:{ago}:{rank}" for rank in range(len(by))) for ago, by in enumerate(_PASSED_OVER))
_SNAPSHOT = tuple(f"snapshot:{rank}" for rank in range(_RANKS))
PRIOR = {kind: p for order in _ORDERS for kind, p in zip(_KINDS[order], _BY_ORDER[order], strict=True)}
PRIOR |= dict(zip(_SEEN, _BY_SEEN, strict=True)) | dict(zip(_SNAPSHOT, _BY_ORDER[1], strict=True))
for _kinds, _by in zip(_PASSED, _PASSED_OVER, strict=True):
    PRIOR |= dict(zip(_kinds, _by, strict=True))

Context = tuple[int, ...]


class _Table:
    """Likeliest successors by the last one, two and three tokens; what was learnt longest ago is dropped first."""

    def __init__(self, max_entries: int) -> None:
        self._max = max_entries
        # Ordered dictionaries drop their first entry at once, plain ones look for it among those that were dropped before.
        self._top: OrderedDict[Context, tuple[int, ...]] = OrderedDict()
        # Pairs that the text itself has shown, where no pass has shown more.
        self._seen: OrderedDict[Context, int] = OrderedDict()

    def learn(self, context: Context, likely: tuple[int, ...]) -> None:
        """After ``context``, ``likely`` was likeliest."""
        for order in _ORDERS:
            if order <= len(context):
                key = context[-order:]
                self._top[key] = likely
                self._top.move_to_end(key)
        while len(self._top) > self._max:
            self._top.popitem(last=False)

    def note(self, context: Context, token: int) -> None:
        """After ``context``, ``token`` came."""
        self._seen[context] = token
        self._seen.move_to_end(context)
        if len(self._seen) > self._max:
            self._seen.popitem(last=False)

    def top(self, key: Context) -> tuple[int, ...]:
        """What was likeliest after it, if that is known."""
        return self._top.get(key, ())

    def seen(self, key: Context) -> int | None:
        """What came after it the last time, if it did."""
        return self._seen.get(key)


def make(config: DrafterConfig) -> Recycling:
    """For ``SourceSpec.made_by``.

    Raises:
        ConfigurationError: the snapshot cannot be read.
    """
    snapshot = config.recycling.snapshot
    return Recycling(config.recycling, warm=None if snapshot is None else read(snapshot))


class Recycling:
    """Token recycling's adjacency matrix (section 3), as a table of contexts of one to three tokens.

    Requests of one tenant share a table; what one tenant's text has shown, no other sees.

    Args:
        warm: what is likely after single tokens, known beforehand; every tenant's.
    """

    prior = PRIOR

    def __init__(self, config: RecyclingConfig, warm: Successors | None = None) -> None:
        self._config = config
        self._warm = warm
        self._tables: OrderedDict[str, _Table] = OrderedDict()

    def open(self, message: OpenSession) -> RecyclingSession:
        table = _Table(self._config.max_entries)
        if message.tenant is not None:
            table = self._tables.setdefault(message.tenant, table)
            self._tables.move_to_end(message.tenant)
        if len(self._tables) > self._config.max_tenants:
            self._tables.popitem(last=False)
        return RecyclingSession(table, self._warm, message.tokens)

    def forget(self, tenant: str) -> None:
        self._tables.pop(tenant, None)


class RecyclingSession:
    """One request's place in its tenant's table."""

    def __init__(self, table: _Table, warm: Successors | None, tokens: Sequence[int]) -> None:
        self._table = table
        self._warm = warm
        self._context: Context = ()
        # Of the latest tokens, latest first: what was likely in their place.
        self._passed: deque[tuple[int, ...]] = deque(maxlen=len(_PASSED))
        self._read(tokens)

    def start(self) -> Context:
        """The last tokens."""
        return self._context

    def follow(self, place: Context, token: int) -> Context:
        return (*place, token)[-_ORDERS[0] :]

    def candidates(self, place: Context) -> Iterator[tuple[int, str]]:
        """Of the longest context that a pass has shown, then of shorter ones; what else may fit last."""
        known: set[int] = set()
        for order in _ORDERS:
            for rank, token in enumerate(self._table.top(place[-order:])[:_RANKS]):
                if token not in known:
                    known.add(token)
                    yield token, _KINDS[order][rank]
        for order in _ORDERS:
            seen = self._table.seen(place[-order:])
            if seen is not None and seen not in known:
                known.add(seen)
                yield seen, _SEEN[order]
        if not known and self._warm is not None:
            for token, kind in zip(dict.fromkeys(self._warm.after(place[-1])), _SNAPSHOT, strict=False):
                known.add(token)
                yield token, kind
        # Only at the text's end, not on the way down a tree.
        if place is self._context:
            for passed, kinds in zip(self._passed, _PASSED, strict=False):
                for token, kind in zip(passed, kinds, strict=False):
                    if token not in known:
                        known.add(token)
                        yield token, kind

    def observe(self, report: StepReport) -> None:
        if report.observation is not None and report.observation.top_ids:
            self._learn(report.observation)
            for token, node in zip(report.committed, (ROOT, *report.accepted_path), strict=False):
                likely = report.observation.top_ids[node + 1]
                self._passed.appendleft(tuple(each for each in likely if each != token))
        self._read(report.committed)

    def catch_up(self) -> bool:
        """Nothing is put off."""
        return False

    def close(self) -> None:
        """The table is the tenant's."""

    def _learn(self, seen: Observation) -> None:
        contexts = {ROOT: self._context}
        for node in range(len(seen.tree)):
            contexts[node] = self.follow(contexts[seen.tree.parents[node]], seen.tree.tokens[node])
        # Deeper nodes first: where two paths end alike, the nearer one to the text has the last word.
        for node in range(len(seen.tree) - 1, ROOT - 1, -1):
            self._table.learn(contexts[node], seen.top_ids[node + 1])

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for order in _ORDERS:
                if order <= len(self._context):
                    self._table.note(self._context[-order:], token)
            self._context = self.follow(self._context, token)
