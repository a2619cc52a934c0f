"""Parts of a pass that are a pending token and a tree each: by columns.

The target's thread, which runs on another core, reads these columns, and requests, parts and trees of answers alone that
may end. Other verdicts are made from what it notes, in the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.native.walks import ChosenPaths, walk_together
from services.verifier.model.tree_rows import TreeOutcomes, TreeRows
from speculation.types import TokenTree


class Treed:
    """What the target's thread needs of such parts, and what it finds.

    Args:
        requests, trees: of the parts, in their order.
        quiet: nothing is read for drafters.

    Attributes:
        rows: what the target computes.
        walked: how far its choices go; None: that is found for each part by itself.
        top_ids: as in ``Outcome``, of each part.
    """

    __slots__ = ("_full_at", "_stops", "rows", "top_ids", "walked")

    def __init__(self, requests: Sequence[LiveRequest], trees: Sequence[TokenTree], *, quiet: bool) -> None:
        self.rows = TreeRows(
            [request.id for request in requests],
            [request.computed for request in requests],
            [request.tokens[-1] for request in requests],
            trees,
            [0] * len(requests) if quiet else [request.observes.top_k for request in requests],
        )
        self._full_at = [request.full_at for request in requests]
        # Of all answers: there are few different ones.
        self._stops = frozenset(chain.from_iterable({request.stop_ids for request in requests}))
        self.walked: ChosenPaths | None = None
        self.top_ids: Sequence[Sequence[tuple[int, ...]]] = ()

    def walk(self, outcomes: TreeOutcomes) -> list[int] | None:
        """Go down all trees. Returns the numbers of the parts whose answers may end; None: nothing is compiled."""
        rows = self.rows
        walked = self.walked = walk_together(rows.counts, rows.tokens, rows.parents, outcomes.ids)
        if walked is None:
            return None
        self.top_ids = outcomes.top_ids
        columns = zip(rows.contexts, walked.tokens, self._full_at, strict=True)
        return [
            number
            for number, (context, tokens, full_at) in enumerate(columns)
            if context + 1 + len(tokens) >= full_at or not self._stops.isdisjoint(tokens)
        ]
