"""How the rows of a pass follow one another: which row, or which request's state, each of them steps from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from services.verifier.kernels.native.library import Library
from services.verifier.recurrence.device_steps import DeviceSteps
from services.verifier.recurrence.walks import FROM_STATE, StateWalk, Walked, WalkRoom, walk


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """A request's part of a pass.

    Attributes:
        slot: of its state.
        accepted: number of rows that earlier passes computed as nodes of trees and that were accepted since. The state has
            not seen them, so it steps over them first.
        chain: number of rows that follow them, one after the other.
        parents: of the nodes behind the chain, as in ``Rows.parents``.
        saved: behind how many of these accepted and chained rows the state is kept, ascending, and in which slots.
    """

    slot: int
    accepted: int
    chain: int
    parents: Sequence[int]
    saved: Sequence[tuple[int, int]] = ()


class Paths(NamedTuple):
    """The rows of all requests, one request after the other: its chain, then its nodes. All on the CPU, int64.

    Attributes:
        first: [requests + 1], where a request begins in ``row`` and ``parent``.
        chain: [requests], how many of its rows are its chain.
        row: numbers of the rows.
        parent: of a node: which node of its request it steps from; ``FROM_STATE``: the end of the chain.
        most_nodes: of one request.
    """

    first: torch.Tensor
    chain: torch.Tensor
    row: torch.Tensor
    parent: torch.Tensor
    most_nodes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The order of a pass.

    Its rows are numbered from 0 on: first the accepted rows of all requests, then the pass's own, then padding, which
    belongs to no request.

    Attributes:
        lines: the requests, in the pass's order.
        padding: number of rows behind all requests' rows.
        library: compiled kernels that may compute it; None: torch does.
        steps: what computes it on another device than a CPU.
    """

    lines: Sequence[Line]
    padding: int
    device: torch.device
    library: Library | None = None
    steps: DeviceSteps | None = None
    _windows: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def accepted(self) -> int:
        """Number of accepted rows of all requests."""
        return sum(line.accepted for line in self.lines)

    @cached_property
    def rows(self) -> int:
        """Number of the pass's own rows, padding included."""
        return sum(line.chain + len(line.parents) for line in self.lines) + self.padding

    @cached_property
    def slots(self) -> torch.Tensor:
        """[requests], their states' slots."""
        return torch.tensor([line.slot for line in self.lines], device=self.device)

    @cached_property
    def ends(self) -> torch.Tensor:
        """[requests], the last row of each one's chain: where its state stands after the pass."""
        return torch.tensor([of_chain[-1] for of_chain, _ in self._numbered], device=self.device)

    @cached_property
    def _numbered(self) -> list[tuple[list[int], list[int]]]:
        """Of each request the numbers of its accepted rows and chain, and of its nodes."""
        found = []
        early, own = 0, self.accepted
        for line in self.lines:
            chain = [*range(early, early + line.accepted), *range(own, own + line.chain)]
            found.append((chain, list(range(own + line.chain, own + line.chain + len(line.parents)))))
            early += line.accepted
            own += line.chain + len(line.parents)
        return found

    @cached_property
    def parents(self) -> list[tuple[int, int, int]]:
        """(row, its parent or ``FROM_STATE``, its request), parents first; without padding."""
        found = []
        for request, (line, (chain, nodes)) in enumerate(zip(self.lines, self._numbered, strict=True)):
            found += [(row, before, request) for before, row in zip([FROM_STATE, *chain], chain, strict=False)]
            found += [
                (row, nodes[parent] if parent >= 0 else chain[-1], request)
                for row, parent in zip(nodes, line.parents, strict=True)
            ]
        return found

    @cached_property
    def paths(self) -> Paths:
        """As compiled kernels read it."""
        ends = self.ends.tolist()
        parents = [parent - ends[request] - 1 for _, parent, request in self.parents]
        return Paths(
            first=torch.tensor([0, *accumulate(len(chain) + len(nodes) for chain, nodes in self._numbered)]),
            chain=torch.tensor([len(chain) for chain, _ in self._numbered]),
            row=torch.tensor([row for row, _, _ in self.parents]),
            parent=torch.tensor(parents).clamp(min=FROM_STATE),
            most_nodes=max(len(nodes) for _, nodes in self._numbered),
        )

    @cached_property
    def walk(self) -> StateWalk:
        """As ``steps`` reads it; states may be kept in mid-line."""
        return walk(self._walked(self.accepted), self.accepted, self.accepted + self.rows, self.device)

    def walk_within(self, accepted: int, room: WalkRoom) -> StateWalk:
        """The walk of a captured pass, whose own rows are numbered from ``accepted`` on."""
        return walk(self._walked(accepted), accepted, accepted + self.rows, self.device, room)

    def _walked(self, accepted: int) -> list[Walked]:
        apart = accepted - self.accepted

        def moved(row: int) -> int:
            return row if row < self.accepted else row + apart

        parents: list[dict[int, int]] = [{} for _ in self.lines]
        for row, parent, request in self.parents:
            parents[request][moved(row)] = moved(parent)
        return [
            Walked(
                slot=line.slot,
                parents=own,
                end=moved(path[-1]),
                saved={moved(path[count - 1]): slot for count, slot in line.saved},
            )
            for line, own, (path, _) in zip(self.lines, parents, self._numbered, strict=True)
        ]

    def windows(self, size: int) -> torch.Tensor:
        """The ``size`` inputs before every row on its path, the oldest first.

        Returns:
            [accepted + rows, size], indices into: the inputs that the requests' states hold, ``size`` each, then the rows'.
            Those of padding are arbitrary.
        """
        if size not in self._windows:
            first = size * len(self.lines)
            found: dict[int, list[int]] = {}
            for row, parent, request in self.parents:
                if parent == FROM_STATE:
                    found[row] = list(range(size * request, size * (request + 1)))
                else:
                    found[row] = [*found[parent], first + parent][1:]
            every = [found[row] for row in range(len(found))] + [[0] * size] * self.padding
            self._windows[size] = torch.tensor(every, dtype=torch.int64, device=self.device).view(len(every), size)
        return self._windows[size]
