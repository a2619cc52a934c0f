"""What token recycling keeps of a tenant's requests: the likeliest successors of one, two and three tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from speculation.tree import ROOT
from speculation.types import TokenTree

# The last tokens of a text or of a path behind it: at most as many as the first of ``ORDERS``.
Context = tuple[int, ...]

ORDERS = (3, 2, 1)
# Kinds of candidates: by the length of the context, and of the likeliest ones by rank.
RANKS = 8
TOP_KINDS = {order: tuple(f"top:{order}:{rank}" for rank in range(RANKS)) for order in ORDERS}
SEEN_KINDS = tuple(f"seen:{order}" for order in range(max(ORDERS) + 1))


def context_after(context: Context, token: int) -> Context:
    """The context one token further."""
    return (*context, token)[-ORDERS[0] :]


class RecyclingTable:
    """Likeliest successors by the last one, two and three tokens; the entry learnt longest ago is dropped first."""

    def __init__(self, max_entries: int) -> None:
        self._max = max_entries
        # A plain dictionary would scan all dropped entries to find its first one.
        self._top: OrderedDict[Context, tuple[int, ...]] = OrderedDict()
        # The token that followed each context in a text; used after what passes have shown.
        self._seen: OrderedDict[Context, int] = OrderedDict()

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
