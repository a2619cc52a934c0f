"""Entries of a pass with one pending token and a tree each, and what the target chooses after their rows: by columns.

Where every request decodes with a draft, a pass has as many of these as there are requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import overload

from typing_extensions import override

from services.verifier.model.target_port import NOT_CHOSEN, ColumnRows, Outcome, Rows, SingleRows
from speculation.records import maker
from speculation.types import TokenTree

_make_outcome, _make_rows = maker(Outcome), maker(Rows)


class TreeRows(ColumnRows):
    """Entries with a pending token and nodes below it, after all of which the target chooses; likely ids are wanted at most.

    >>> tree = TokenTree(tokens=(6, 7), parents=(-1, 0), sources=("s", "s"))
    >>> rows = TreeRows(["a", "b"], [3, 8], [5, 9], [tree, TokenTree()], [4, 0])
    >>> rows[0] == Rows(request_id="a", context=3, tokens=(5, 6, 7), parents=(-1, 0), logits=3, top_k=4)
    True
    >>> rows[1] == Rows(request_id="b", context=8, tokens=(9,), logits=1)
    True

    Attributes:
        counts: nodes of each entry; ``parents``: of all nodes.
        top_ks: as in ``Rows``, of each entry.
    """

    __slots__ = ("counts", "parents", "top_ks")

    def __init__(
        self,
        request_ids: list[str],
        contexts: list[int],
        pending: Sequence[int],
        trees: Sequence[TokenTree],
        top_ks: list[int],
    ) -> None:
        tokens = [*chain.from_iterable([(token, *tree.tokens) for token, tree in zip(pending, trees, strict=True)])]
        super().__init__(request_ids, contexts, tokens)
        self.counts = [len(tree.tokens) for tree in trees]
        self.parents = [*chain.from_iterable([tree.parents for tree in trees])]
        self.top_ks = top_ks

    @override
    def _make(self) -> list[Rows]:
        made, tokens, parents, node = list[Rows](), tuple(self.tokens), tuple(self.parents), 0
        columns = zip(self.request_ids, self.contexts, self.counts, self.top_ks, strict=True)
        for number, (request_id, context, count, top_k) in enumerate(columns):
            made.append(
                _make_rows(
                    request_id=request_id,
                    context=context,
                    tokens=tokens[node + number : node + number + 1 + count],
                    parents=parents[node : node + count],
                    logits=1 + count,
                    top_k=top_k,
                )
            )
            node += count
        return made


class TreeOutcomes(Sequence[Outcome]):
    """Those of entries that want the likeliest tokens, likely ids, and no more. Each ``Outcome`` is made once one is read.

    Args:
        batch: after whose rows the target chooses as ``Rows`` says.

    Attributes:
        ids: the likeliest token after each of these rows, whether or not earlier choices lead to it; none is ``NOT_CHOSEN``.
        top_ids: as in ``Outcome``, of each entry.
    """

    __slots__ = ("_batch", "_made", "ids", "top_ids")

    def __init__(self, batch: Sequence[Rows], ids: Sequence[int], top_ids: Sequence[Sequence[tuple[int, ...]]]) -> None:
        self._batch, self.ids, self.top_ids = batch, ids, top_ids
        self._made: list[Outcome] | None = None

    @override
    def __len__(self) -> int:
        return len(self._batch)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Outcome]: ...

    @override
    def __getitem__(self, at: int | slice) -> Outcome | Sequence[Outcome]:
        if not isinstance(at, slice) or at.step is not None:
            return self._all()[at]
        first, end, _ = at.indices(len(self))
        before, own = (sum([rows.logits for rows in part]) for part in (self._batch[:first], self._batch[first:end]))
        return TreeOutcomes(self._batch[first:end], self.ids[before : before + own], self.top_ids[first:end])

    @override
    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._all())

    def _all(self) -> list[Outcome]:
        if self._made is None:
            firsts = accumulate([rows.logits for rows in self._batch], initial=0)
            self._made = []
            for rows, top_ids, first in zip(self._batch, self.top_ids, firsts, strict=False):
                choices = followed(rows, self.ids, first)[0] if rows.logits else ()
                self._made.append(_make_outcome(choices=tuple(choices), top_ids=top_ids))
        return self._made


def followed(rows: Rows, ids: Sequence[int], first: int) -> tuple[list[int], bool]:
    """The choices down a tree by the likeliest token after each row of the pass, and whether all that are reached are known.

    Args:
        rows: of which the target chooses after some.
        ids: of the pass; those of these rows are the ``first`` and later ones.
    """
    parents, choice = rows.parents, ids[first]
    if not parents:
        return [choice], choice != NOT_CHOSEN
    choices = [choice, *[NOT_CHOSEN] * len(parents)]
    known = choice != NOT_CHOSEN
    # Parents come before their children.
    for node, (token, parent) in enumerate(zip(rows.tokens[-len(parents) :], parents, strict=True)):
        if choices[parent + 1] == token:
            choices[node + 1] = choice = ids[first + node + 1]
            known = known and choice != NOT_CHOSEN
    return choices, known


def counts_of(batch: Sequence[Rows]) -> list[int]:
    """After how many rows of each entry the target chooses."""
    return [1 + count for count in batch.counts] if isinstance(batch, TreeRows) else [rows.logits for rows in batch]


def sizes_of(batch: Sequence[Rows]) -> list[int]:
    """How many rows each entry has."""
    if isinstance(batch, TreeRows):
        return counts_of(batch)
    return [1] * len(batch) if isinstance(batch, SingleRows) else [len(rows.tokens) for rows in batch]


def top_ks_of(batch: Sequence[Rows]) -> list[int]:
    """How many likely ids each entry wants."""
    return batch.top_ks if isinstance(batch, TreeRows) else [rows.top_k for rows in batch]
