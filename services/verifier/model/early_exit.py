"""An early exit that prunes trees inside a pass (Bhendawade et al., 2402.11131, section 3.2.3).

Just below the layer at which streams enter, an adapter of low rank turns the state of a row into one that the target's final
norm and output layer read. So every edge of the tree, from a row to the token of a child, has a probability before the row's
own logits are known. In the paper, an edge below a threshold is dropped with all that hangs on it. Here only its streams are
dropped: the rows themselves go on and are checked, so that no answer and no accepted token changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from services.verifier.kernels.native.low_rank_kernel import LowRank
from services.verifier.model.target_port import Rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pruning:
    """When a row has no streams.

    Attributes:
        adapter: of the early exit; what it adds to a state.
        below: an edge with a smaller probability is dropped, above 0 and below 1.
    """

    adapter: LowRank
    below: float


class EarlyExit:
    """Tells which rows lie behind a dropped edge.

    Args:
        norm: the target's final one.
        head: the target's output layer.
    """

    def __init__(self, pruning: Pruning, norm: nn.Module, head: nn.Module) -> None:
        self._pruning = pruning
        # What hangs on these modules belongs to the rows of the pass.
        self._norm, self._head = norm.forward, head.forward

    def pruned(self, batch: Sequence[Rows], states: torch.Tensor) -> list[Rows]:
        """``batch`` without the ends that lie behind a dropped edge.

        Args:
            states: [rows, h], what the layer reads at which streams enter.
        """
        edges: dict[tuple[int, int], tuple[int, int]] = {}
        begin = 0
        for number, rows in enumerate(batch):
            for end in rows.ends:
                for node in _path(rows, end):
                    parent, at = rows.parents[node], begin + rows.chain
                    edges[number, node] = (at + parent, rows.tokens[rows.chain + node])
            begin += len(rows.tokens)
        if not edges:
            return list(batch)
        kept = dict(zip(edges, self._likely(states, list(edges.values())), strict=True))
        return [
            replace(rows, ends=tuple(end for end in rows.ends if all(kept[number, node] for node in _path(rows, end))))
            for number, rows in enumerate(batch)
        ]

    def _likely(self, states: torch.Tensor, edges: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each edge, from a row to a token, stays."""
        rows = sorted({row for row, _ in edges})
        own = states[rows]
        own = own + self._pruning.adapter.of(own)
        logs = self._head(self._norm(own[None]))[0].float().log_softmax(-1)
        at = {row: place for place, row in enumerate(rows)}
        chances = logs[[at[row] for row, _ in edges], [token for _, token in edges]].exp()
        return (chances >= self._pruning.below).tolist()  # type: ignore[no-any-return]


def _path(rows: Rows, end: int) -> list[int]:
    """The nodes from a row up to the root, which is none."""
    found = []
    node = end - rows.chain
    while node >= 0:
        found.append(node)
        node = rows.parents[node]
    return found
