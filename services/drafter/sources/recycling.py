"""Token recycling: drafts what was likely the last time that the target saw a token (Luo et al., 2024, arXiv 2408.08696).

Every pass shows the likeliest ids after each verified node, rejected ones included. The table keeps the latest ones. The
paper's table is keyed by the last token; here the last three and two tokens are looked up first, if they are known. A token
that was likely at one of the last two positions but was not chosen there is a candidate too: it often comes next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.drafter.config import DrafterConfig, RecyclingConfig
from services.drafter.native.recycling_table import CompiledTable, CompiledTextEnd, recycling_table
from services.drafter.sources.recycling_table import (
    ORDERS,
    RANKS,
    SEEN_KINDS,
    TOP_KINDS,
    Context,
    RecyclingTable,
    TextEnd,
    context_after,
)
from speculation.messages import OpenSession, StepReport
from speculation.successor_table import Successors, read

NAME = "recycling"

# Prior probability of the first, second, ... successor, by the length of the context (measured on a small chat model).
_BY_ORDER = {
    3: (0.67, 0.09, 0.04, 0.022, 0.015, 0.012, 0.011, 0.01),
    2: (0.37, 0.1, 0.045, 0.034, 0.02, 0.015, 0.012, 0.01),
    1: (0.2, 0.08, 0.04, 0.035, 0.02, 0.015, 0.012, 0.011),
}
# The same for tokens passed over at the last position, and at the one before.
_PASSED_OVER = ((0.026, 0.016, 0.014, 0.011, 0.008, 0.007), (0.02, 0.012, 0.006, 0.005, 0.004, 0.004))
_BY_SEEN = (0.05, 0.075, 0.2, 0.67)
_PASSED = tuple(tuple(f"passed:{ago}:{rank}" for rank in range(len(by))) for ago, by in enumerate(_PASSED_OVER))
_SNAPSHOT = tuple(f"snapshot:{rank}" for rank in range(RANKS))
PRIOR = {kind: p for order in ORDERS for kind, p in zip(TOP_KINDS[order], _BY_ORDER[order], strict=True)}
PRIOR |= dict(zip(SEEN_KINDS, _BY_SEEN, strict=True)) | dict(zip(_SNAPSHOT, _BY_ORDER[1], strict=True))
for _kinds, _by in zip(_PASSED, _PASSED_OVER, strict=True):
    PRIOR |= dict(zip(_kinds, _by, strict=True))


def make(config: DrafterConfig) -> Recycling:
    """For ``catalogue.MAKERS``.

    Raises:
        ConfigurationError: the snapshot cannot be read.
    """
    snapshot = config.recycling.snapshot
    return Recycling(config.recycling, warm=None if snapshot is None else read(snapshot))


class Recycling:
    """Token recycling's adjacency matrix (section 3), as a table of contexts of one to three tokens.

    Requests of one tenant for one adapter share a table, and no others.

    Args:
        warm: successors of single tokens from a snapshot, for all tenants.
    """

    prior = PRIOR

    def __init__(self, config: RecyclingConfig, warm: Successors | None = None) -> None:
        self._config = config
        self._warm = warm
        self._tables: OrderedDict[tuple[str, str], RecyclingTable | CompiledTable] = OrderedDict()

    def open(self, message: OpenSession) -> RecyclingSession:
        table = recycling_table(self._config.max_entries)
        if message.tenant is not None:
            whose = message.tenant, message.adapter
            table = self._tables.setdefault(whose, table)
            self._tables.move_to_end(whose)
        if len(self._tables) > self._config.max_tenants:
            self._tables.popitem(last=False)
        return RecyclingSession(table, self._warm, message.tokens)

    def forget(self, tenant: str) -> None:
        for whose in [whose for whose in self._tables if whose[0] == tenant]:
            del self._tables[whose]


class RecyclingSession:
    """One request's place in its tenant's table.

    Attributes:
        table: the tenant's.
        warm: see ``Recycling``.
        end: of its text.
    """

    def __init__(self, table: RecyclingTable | CompiledTable, warm: Successors | None, tokens: Sequence[int]) -> None:
        self.table = table
        self.warm = warm
        self.end: TextEnd | CompiledTextEnd = table.begin(tokens)
        self._started: Context = ()

    def start(self) -> Context:
        # The same object until the text goes on, by which ``candidates`` knows the text's end.
        if self._started != (context := self.end.context):
            self._started = context
        return self._started

    def follow(self, place: Context, token: int) -> Context:
        return context_after(place, token)

    def candidates(self, place: Context) -> Iterator[tuple[int, str]]:
        """Successors of the longest known context, then of shorter ones; the least reliable candidates come last."""
        found = self.table.candidates(place)
        yield from found
        known = {token for token, _ in found}
        if not known and self.warm is not None:
            for token, kind in zip(dict.fromkeys(self.warm.after(place[-1])), _SNAPSHOT, strict=False):
                known.add(token)
                yield token, kind
        # Only at the end of the text, not further down a tree.
        if place is self._started:
            for passed, kinds in zip(self.end.passed, _PASSED, strict=False):
                for token, kind in zip(passed, kinds, strict=False):
                    if token not in known:
                        known.add(token)
                        yield token, kind

    def observe(self, report: StepReport) -> None:
        self.table.observe(self.end, report)  # type: ignore[arg-type]  # The end is of the table's own kind.

    def catch_up(self) -> bool:
        """No work is deferred."""
        return False

    def close(self) -> None:
        """The table stays: it is the tenant's."""
