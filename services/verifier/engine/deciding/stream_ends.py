"""Decides which rows of a pass have stream rows: those at which the accepted path is likely to end.

Only the stream rows of the path's last row are of use. They are computed for a row if their expected gain, times the chance
that the path ends there, is more than their cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.verifier.engine.deciding.asking import Prices
from services.verifier.model.target_port import StreamSpec
from speculation.sources import kind_of
from speculation.tree import likely_ends
from speculation.types import TokenTree

# Most rows of a request that have streams in one pass. The further ones seldom end a path.
MOST_ENDS = 3
# After so many steps without streams, the likeliest row has some all the same: drafts may be better now, or rows cheaper.
EXPLORE_EVERY = 16
# The kind of source that drafts from streams.
_STREAMING = "streaming"


def stream_source(sources: Iterable[str]) -> str:
    """The source that drafts from streams; empty: none does."""
    return next((name for name in sources if kind_of(name) == _STREAMING), "")


def choose_ends(
    tree: TokenTree, chances: Sequence[float], streams: StreamSpec, tokens: float, prices: Prices | None
) -> tuple[int, ...]:
    """The nodes, and ``ROOT``, that have streams in the coming pass.

    Args:
        chances: as in ``likely_ends``; 0 for a probe, since it is never accepted.
        tokens: expected number of accepted tokens of a draft from streams.
        prices: None where time does not count.
    """
    room = min(MOST_ENDS, (streams.most_rows - len(tree)) // streams.rows)
    likeliest = likely_ends(tree.parents, chances)[: max(0, room)]
    if prices is None:
        return tuple(end for end, _ in likeliest)
    gain_s, cost_s = prices.gain_s(tokens, 0.0), streams.rows * streams.share * prices.row_s
    if streams.two_steps:
        # The gain is then at most the drafter's own cost: one more reading of these layers.
        gain_s = min(gain_s, streams.share * prices.pass_s / prices.requests)
    return tuple(end for end, chance in likeliest if chance * gain_s > cost_s)
