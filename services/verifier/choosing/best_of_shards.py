"""The likeliest ids of rows whose logits lie with several ranks: each finds its own part's best, and only these travel.

A whole row has hundreds of thousands of bytes, a rank's few best some hundred. What is found is what one process finds in
whole rows: the greatest logits, of equals the lowest ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from services.verifier.kernels.sharded_layers import ShardedOutput
from services.verifier.stages.stage_ranks import StageRanks

# Of each row read, its likeliest ids, likeliest first.
LikeliestIds = Sequence[tuple[int, ...]]


class BestOfRanks:
    """Lets a pass's rows be gathered whole, or only their best. All ranks of a stage do the same.

    Attributes:
        ids: of the last pass's rows; None: its rows are whole.
    """

    def __init__(self, output: ShardedOutput, finder: LikeliestKernel) -> None:
        self._output, self._finder = output, finder
        self.ids: LikeliestIds | None = None

    def rows_of(self, run: Callable[[], torch.Tensor], k: int) -> torch.Tensor:
        """What ``run`` makes by the output layer: whole rows, or this rank's part of them where ``ids`` are found.

        Args:
            k: how many ids of each row suffice; 0: whole rows are needed.

        Raises:
            TargetLost: another rank is gone.
        """
        self.ids = None
        if not 0 < k <= self._output.out_features // self._output.shards.count:
            return run()
        self._output.whole = False
        try:
            own = run().float()
        finally:
            self._output.whole = True
        self.ids = best_of_shards(own, k, self._output.shards, self._finder)
        return self._output.shards.columns(own) if self.ids is None else own


def best_of_ranks(output: nn.Module | None, library: Library | None) -> BestOfRanks | None:
    """For a stage with this output layer; None: it has none that ranks share, or there are no native kernels.

    Captured passes of GPUs gather whole rows, within their graphs.
    """
    if library is None or not isinstance(output, ShardedOutput):
        return None
    return BestOfRanks(output, LikeliestKernel(library))


def best_of_shards(own: torch.Tensor, k: int, shards: StageRanks, finder: LikeliestKernel) -> LikeliestIds | None:
    """The ``k`` likeliest ids of each row. All ranks call this with their parts, and get the same.

    Args:
        own: [rows, vocabulary / ranks], float32, on the CPU: this rank's part of the logits.

    Returns:
        None where they do not say what whole rows would: a logit is not a number, the greatest is not finite, or a part has
        fewer than ``k`` above -inf.

    Raises:
        TargetLost: another rank is gone.
    """
    told = shards.rows(torch.tensor(_told(own, k, finder), dtype=torch.float64).view(len(own), 2, k)).tolist()
    length, found = own.shape[1], list[tuple[int, ...]]()
    for parts in zip(*told, strict=True):
        pairs = [
            (-value, rank * length + int(at))
            for rank, (values, places) in enumerate(parts)
            for value, at in zip(values, places, strict=True)
            if value > -math.inf
        ]
        if len(pairs) < shards.count * k:
            return None
        # Of equals the lowest ids come first.
        pairs.sort()
        found.append(tuple([each for _, each in pairs[:k]]))
    return found


def _told(own: torch.Tensor, k: int, finder: LikeliestKernel) -> list[float]:
    """What a rank tells of each row: ``k`` logits, then their places in its part; -inf where these do not suffice.

    Doubles hold both exactly, so that one gather carries them. Lists, since few numbers take less time so than in arrays.
    """
    rows = own.numpy()
    tops = rows.argmax(1).tolist()
    # The kernel passes over what is not a number; the greatest of a row is none then, by numpy.
    usable = all(math.isfinite(row.item(top)) for row, top in zip(rows, tops, strict=True))
    found = None
    if usable:
        found = [(top,) for top in tops] if k == 1 else finder.find(own, range(len(rows)), k)
    if found is None:
        return [-math.inf] * (2 * k * len(rows))
    return [
        number for row, places in zip(rows, found, strict=True) for number in (*map(row.item, places), *map(float, places))
    ]
