"""The ranks of one pipeline stage, each with a shard of every layer (tensor parallelism), and what they exchange.

Products are split by output columns, attention by heads, the vocabulary by ids. So every number is computed by one rank, as
one process would compute it, and only copies of numbers cross ranks, never sums: the bits do not depend on their number.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.verifier.model.target_port import Rows
from services.verifier.stages.exchange import Exchange
from speculation.errors import TargetLost


class Gathers(Protocol):
    """Carries tensors between all ranks of a stage."""

    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        """What every rank gives, which all have one shape and type, in the order of the ranks: [ranks, ...].

        Args:
            within_s: longest wait for another rank, in seconds; None: as long as a pass may take.

        Raises:
            TargetLost: a rank is gone, or takes longer.
        """
        ...


class _Repeated:
    """Until the ranks are connected: as if all of them made the same. Shapes are right, and a model computes something."""

    def __init__(self, count: int) -> None:
        self._count = count

    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        return own.expand(self._count, *own.shape)


class RankExchange:
    """Implements ``Gathers`` between processes; see ``Exchange``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def gather(self, own: torch.Tensor, within_s: float | None = None) -> torch.Tensor:
        exchange, own = self._exchange, own.contiguous()
        sent = [exchange.send_shard(own, rank) for rank in exchange.siblings if rank != exchange.rank]
        made = own.new_empty(len(exchange.siblings), *own.shape)
        for place, rank in zip(made, exchange.siblings, strict=True):
            if rank == exchange.rank:
                place.copy_(own)
            else:
                exchange.receive_shard(place, rank, within_s)
        for one in sent:
            one.wait()
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The rows of a stored weight, or the numbers of a bias, that a rank holds.

    Attributes:
        ranges: of them, in the order in which they are held. Of what lies one after the other in a weight, such as gates and
            ups, a rank has some of each.
        whole: number of all of them.
        axis: the dimension that is cut.
    """

    ranges: tuple[range, ...]
    whole: int
    axis: int = 0

    @classmethod
    def evenly(cls, index: int, count: int, whole: int, *, axis: int = 0, pieces: int = 1) -> Cut:
        """The share of one of ``count`` ranks in each of ``pieces`` equal ones.

        Of two ranks that share four gates and four ups the second holds

        >>> Cut.evenly(1, 2, 8, pieces=2).ranges
        (range(2, 4), range(6, 8))
        """
        each = whole // pieces // count
        starts = range(index * each, whole, whole // pieces)
        return cls(ranges=tuple(range(start, start + each) for start in starts), whole=whole, axis=axis)

    @property
    def held(self) -> int:
        """How many a rank holds."""
        return sum(map(len, self.ranges))

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the weight of which a rank holds as much as ``own`` says."""
        return (*own[: self.axis], self.whole, *own[self.axis + 1 :])

    def part_of(self, whole: torch.Tensor, axis: int) -> torch.Tensor:
        """What a rank holds of a tensor that has all of them along ``axis``."""
        parts = [whole.narrow(axis, one.start, len(one)) for one in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


class StageRanks:
    """One rank's view of its stage. Every rank calls the same methods in the same order.

    Args:
        index: of this rank.
        count: of the stage's ranks, at least 2.

    Attributes:
        cuts: the part of each weight that this rank holds, by its name in the stage's model, once that is loaded.
    """

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.cuts: Mapping[str, Cut] = {}
        self._ranks: Gathers = _Repeated(count)
        self._agreeing: Gathers = self._ranks
        self._passes = 0

    def connect(self, ranks: Gathers, on_device: Gathers | None = None) -> None:
        """From now on, exchange with the others.

        Args:
            on_device: carries what the layers make; None: ``ranks`` does, as it carries what they agree on.
        """
        self._ranks, self._agreeing, self._passes = on_device or ranks, ranks, 0

    def rows(self, own: torch.Tensor) -> torch.Tensor:
        """What all ranks give, [ranks, ...]."""
        return self._ranks.gather(own)

    def columns(self, own: torch.Tensor) -> torch.Tensor:
        """The columns of all ranks, [..., columns of a rank], side by side."""
        return self._ranks.gather(own).movedim(0, -2).flatten(-2)

    def agree(self, batch: Sequence[Rows], adapters: Sequence[str] = ()) -> None:
        """Make sure that all ranks are to compute the same pass.

        Args:
            adapters: digests of what the entries have, if they may have any.

        Raises:
            TargetLost: they are not.
        """
        told = [(rows.context, rows.tokens, rows.parents, rows.read, rows.layers, rows.noise) for rows in batch]
        self._agree_on(zlib.crc32(repr((told, adapters)).encode()))

    def beat(self, within_s: float) -> None:
        """Make sure that all ranks answer.

        Raises:
            TargetLost: one does not, or has seen other passes.
        """
        self._agree_on(0, within_s)

    def _agree_on(self, number: int, within_s: float | None = None) -> None:
        self._passes += 1
        own = torch.tensor([self._passes, number])
        if any(not torch.equal(own, other) for other in self._agreeing.gather(own, within_s)):
            raise TargetLost("the ranks of a stage of the target disagree on what is to be computed")
