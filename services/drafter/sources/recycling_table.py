"""What token recycling keeps of a tenant's requests: the likeliest successors of one, two and three tokens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from speculation.messages import StepReport
from speculation.tree import ROOT
from speculation.types import TokenTree

# The last tokens of a text or of a path behind it: at most as many as the first of ``ORDERS``.
Context = tuple[int, ...]

ORDERS = (3, 2, 1)
# Kinds of candidates: by the length of the context, and of the likeliest ones by rank.
RANKS = 8
TOP_KINDS = {order: tuple(f"top:{order}:{rank}" for rank in range(RANKS)) for order in ORDERS}
SEEN_KINDS = tuple(f"seen:{order}" for order in range(max(ORDERS) + 1))
# The latest positions whose likely tokens that were not chosen are kept.
PASSED = 2


def context_after(context: Context, token: int) -> Context:
    """The context one token further."""
    return (*context, token)[-ORDERS[0] :]


class TextEnd:
    """Where a text ends.

    Attributes:
        context: its last tokens.
        passed: for each of the latest tokens, latest first: the likely tokens that it was chosen over.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.passed: deque[tuple[int, ...]] = deque(maxlen=PASSED)


class RecyclingTable:
    """Likeliest successors by the last one, two and three tokens; the entry learnt longest ago is dropped first."""

    def __init__(self, max_entries: int) -> None:
        self._max = max_entries
        # A plain dictionary would scan all dropped entries to find its first one.
        self._top: OrderedDict[Context, tuple[int, ...]] = OrderedDict()
        # The token that followed each context in a text; used after what passes have shown.
        self._seen: OrderedDict[Context, int] = OrderedDict()

    def begin(self, tokens: Sequence[int]) -> TextEnd:
        """Learn what follows what in a text; returns its end."""
        return TextEnd(self.read((), tokens))

    def observe(self, end: TextEnd, report: StepReport) -> None:
        """Learn from a step behind a text, and move the text's end behind its tokens."""
        if report.observation is not None and report.observation.top_ids:
            self.learn(end.context, report.observation.tree, report.observation.top_ids)
            for token, node in [*zip(report.committed, (ROOT, *report.accepted_path), strict=False)][-PASSED:]:
                likely = report.observation.top_ids[node + 1]
                end.passed.appendleft(tuple([each for each in likely if each != token]))
        end.context = self.read(end.context, report.committed)

    def learn(self, context: Context, tree: TokenTree, top_ids: Sequence[tuple[int, ...]]) -> None:
        """Note the likeliest tokens after ``context`` and after every node of a tree behind it, in a pass."""
        contexts = {ROOT: context}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            contexts[node] = context_after(contexts[parent], token)
        # Deeper nodes first: if two paths end in the same context, the one nearer to the text is kept.
        for node in range(len(tree) - 1, ROOT - 1, -1):
            for order in ORDERS:
                if order <= len(contexts[node]):
                    key = contexts[node][-order:]
                    self._top[key] = top_ids[node + 1]
                    self._top.move_to_end(key)
            while len(self._top) > self._max:
                self._top.popitem(last=False)

    def read(self, context: Context, tokens: Sequence[int]) -> Context:
        """Note that tokens followed ``context`` in a text, one after the other; returns the context after them."""
        for token in tokens:
            for order in ORDERS:
                if order <= len(context):
                    key = context[-order:]
                    self._seen[key] = token
                    self._seen.move_to_end(key)
                    if len(self._seen) > self._max:
                        self._seen.popitem(last=False)
            context = context_after(context, token)
        return context

    def candidates(self, context: Context) -> list[tuple[int, str]]:
        """Successors of the longest known context, then of shorter ones; those of texts come last. Each with its kind."""
        found: dict[int, str] = {}
        keys = [context[-order:] for order in ORDERS]
        for order, key in zip(ORDERS, keys, strict=True):
            for token, kind in zip(self.top(key), TOP_KINDS[order], strict=False):
                found.setdefault(token, kind)
        for order, key in zip(ORDERS, keys, strict=True):
            if (seen := self.seen(key)) is not None:
                found.setdefault(seen, SEEN_KINDS[order])
        return list(found.items())

    def top(self, key: Context) -> tuple[int, ...]:
        """The likeliest tokens after ``key``; empty if unknown."""
        return self._top.get(key, ())

    def seen(self, key: Context) -> int | None:
        """The token that followed ``key`` the last time; None if unknown."""
        return self._seen.get(key)
