"""Where stream rows stand in a pass; see ``stream_rows``.

For attention a stream is a branch of the tree: its first row hangs on the row that it belongs to, each further one on the
one before. So it sees the committed tokens, that row's ancestors, that row, and its own stream, and no other row sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.verifier.model.target_port import Rows


def with_streams(rows: Rows, streams: int) -> Rows:
    """``rows`` with ``streams`` more nodes, one below the other, below each of ``rows.ends``. Their tokens say nothing."""
    parents = list(rows.parents)
    for end in rows.ends:
        # The chain's last row is node -1, the tree's root.
        parent = end - rows.chain
        for _ in range(streams):
            parents.append(parent)
            parent = len(parents) - 1
    missing = len(parents) - len(rows.parents)
    return replace(rows, tokens=(*rows.tokens, *(0,) * missing), parents=tuple(parents))


def streams_last(batch: Sequence[Rows], padding: int, stream_rows: Sequence[int]) -> list[int]:
    """The order of a pass's rows that puts the stream rows behind all others, padding included.

    Args:
        stream_rows: of each entry of ``batch``, number of its stream rows, which are its last rows.
    """
    first: list[int] = []
    behind: list[int] = []
    begin = 0
    for rows, count in zip(batch, stream_rows, strict=True):
        end = begin + len(rows.tokens)
        first += range(begin, end - count)
        behind += range(end - count, end)
        begin = end
    return [*first, *range(begin, begin + padding), *behind]
