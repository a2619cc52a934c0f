"""The likeliest tokens down the trees of a pass, which a device has found after every row, for all entries by columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

from typing_extensions import override

from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Rows
from speculation.records import maker

_make_outcome = maker(Outcome)


class TreeOutcomes(Sequence[Outcome]):
    """Those of entries that want the likeliest tokens, likely ids, and no more. An ``Outcome`` is made where one is read.

    Args:
        batch: after whose rows the target chooses as ``Rows`` says.

    Attributes:
        ids: the likeliest token after each of these rows, whether or not earlier choices lead to it; none is ``NOT_CHOSEN``.
        top_ids: as in ``Outcome``, of each entry.
    """

    __slots__ = ("_batch", "ids", "top_ids")

    def __init__(self, batch: Sequence[Rows], ids: Sequence[int], top_ids: Sequence[tuple[tuple[int, ...], ...]]) -> None:
        self._batch, self.ids, self.top_ids = batch, ids, top_ids

    @override
    def __len__(self) -> int:
        return len(self._batch)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Outcome]: ...

    @override
    def __getitem__(self, at: int | slice) -> Outcome | Sequence[Outcome]:
        if isinstance(at, slice) and at.step is None:
            first, end, _ = at.indices(len(self._batch))
            before, own = (sum([rows.logits for rows in part]) for part in (self._batch[:first], self._batch[first:end]))
            return TreeOutcomes(self._batch[first:end], self.ids[before : before + own], self.top_ids[first:end])
        return [*self][at]

    @override
    def __iter__(self) -> Iterator[Outcome]:
        firsts = accumulate([rows.logits for rows in self._batch], initial=0)
        for rows, top_ids, first in zip(self._batch, self.top_ids, firsts, strict=False):
            choices = followed(rows, self.ids, first)[0] if rows.logits else ()
            yield _make_outcome(choices=tuple(choices), top_ids=top_ids)


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
