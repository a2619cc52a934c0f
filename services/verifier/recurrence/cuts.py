"""Cuts a pass where states are kept in mid-line: what follows steps afterwards, from the state as it stands then.

A state is the same bits however a text is cut, so the cut changes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from services.verifier.recurrence.order import Line


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPart:
    """Rows that step together.

    Attributes:
        lines: of the requests that have some. Where states are kept, they are so at the ends of these lines.
        padding: number of rows behind them.
        rows: their numbers in the whole pass, as ``Order`` counts them: accepted ones, then others, padding included.
    """

    lines: Sequence[Line]
    padding: int
    rows: Sequence[int]


def cut(lines: Sequence[Line], padding: int) -> list[CutPart]:
    """The parts of a pass, in the order in which they step; a single one where nothing is kept in mid-line."""
    early, own = 0, sum(line.accepted for line in lines)
    accepted = own
    pieces: list[list[_Piece]] = []
    for line in lines:
        pieces.append(list(_pieces(line, early, own)))
        early, own = early + line.accepted, own + line.chain + len(line.parents)
    parts: list[CutPart] = []
    for together in zip_longest(*pieces):
        some = [piece for piece in together if piece is not None]
        behind = range(0 if parts else padding)
        rows = sorted(chain.from_iterable(rows for _, rows in some), key=lambda row: row >= accepted)
        parts.append(
            CutPart(lines=[line for line, _ in some], padding=len(behind), rows=[*rows, *(own + row for row in behind)])
        )
    return parts


_Piece = tuple[Line, list[int]]


def _pieces(line: Line, early: int, own: int) -> Iterator[_Piece]:
    """The pieces of a line, and the numbers of their rows.

    Args:
        early, own: the numbers of its first accepted row, and of the first of its others.
    """
    path = [*range(early, early + line.accepted), *range(own, own + line.chain)]
    nodes = range(own + line.chain, own + line.chain + len(line.parents))
    begin = 0
    for end in sorted({*(count for count, _ in line.saved), len(path)}):
        last = end == len(path)
        accepted = max(0, min(end, line.accepted) - begin)
        yield (
            replace(
                line,
                accepted=accepted,
                chain=end - begin - accepted,
                parents=line.parents if last else (),
                saved=[(count - begin, slot) for count, slot in line.saved if count == end],
            ),
            [*path[begin:end], *(nodes if last else ())],
        )
        begin = end
