"""Passes with states whose tensors stay at fixed addresses, as captured graphs need them.

All rows of such a pass are noted in one place for all passes; the next one finds the accepted nodes there. It has room for
so many of them before its own rows. What does not fit is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from services.verifier.attention.calls import Call, Pass
from services.verifier.attention.fixed import Buckets, FixedPass, Largest
from services.verifier.model.target_port import Rows
from services.verifier.model.to_device import to_device
from services.verifier.recurrence.order import Line, Order
from services.verifier.recurrence.recurrence import Recurrence, Steps
from services.verifier.recurrence.room import captured_places, noted_rows, places_of, room_for_accepted
from services.verifier.recurrence.state_pool import StatePool
from services.verifier.recurrence.walks import StateWalk, WalkRoom


@dataclass(frozen=True, kw_only=True, eq=False)
class _CapturedOrder(Order):
    """The order of any pass that has the same room."""

    given: StateWalk

    @cached_property
    @override
    def accepted(self) -> int:
        return self.given.accepted

    @cached_property
    @override
    def walk(self) -> StateWalk:
        return self.given


class CapturedSteps:
    """The states' part of passes of so many rows, padding included, and of up to so many requests.

    Args:
        most_rows: of any such pass.
    """

    def __init__(self, pool: StatePool, rows: int, requests: int, most_rows: int) -> None:
        self._pool, self._rows, self._most_rows = pool, rows, most_rows
        requests = min(rows, requests)
        # Every request has an end.
        self._room = WalkRoom(requests=requests, ends=2 * requests + 8, places=captured_places(rows))
        self._accepted = room_for_accepted(rows)
        self._order = self._order_of([])
        self._taken = torch.zeros(self._accepted, dtype=torch.int64, device=pool.device)

    def fits(self, batch: Sequence[Rows]) -> bool:
        """Whether the requests' accepted rows are there, and there is room for all that their walk needs."""
        places = sum(places_of(len(rows.parents)) for rows in batch)
        return (
            len(batch) <= self._room.requests
            and places <= self._room.places
            and self._pool.ends(batch) <= self._room.ends
            and self._pool.fits_captured(batch, self._accepted)
        )

    def fill(self, batch: Sequence[Rows]) -> None:
        """Lay out ``batch``, which ``fits``."""
        lines, taken = self._pool.begin_captured(batch)
        laid_out = self._order_of(lines)
        self._order.walk.numbers.copy_(laid_out.walk.numbers)
        if taken:
            self._taken[: len(taken)].copy_(to_device(taken, self._pool.device))

    def running(self) -> RunningCaptured:
        """Answers the layers of the pass that is laid out."""
        return RunningCaptured(self._pool, self._order, self._taken, self._most_rows)

    def _order_of(self, lines: Sequence[Line]) -> _CapturedOrder:
        pool, own = self._pool, sum(line.chain + len(line.parents) for line in lines)
        order = Order(lines=lines, padding=self._rows - own, device=pool.device)
        walk = order.walk_within(self._accepted, self._room)
        return _CapturedOrder(lines=(), padding=self._rows, device=pool.device, steps=pool.steps, given=walk)


class RunningCaptured:
    """Implements ``Steps``; what it launches depends on the room alone."""

    def __init__(self, pool: StatePool, order: Order, taken: torch.Tensor, most_rows: int) -> None:
        self._pool, self._order, self._taken, self._most_rows = pool, order, taken, most_rows
        self._layer = 0

    def step(self, recurrence: Recurrence, given: torch.Tensor) -> torch.Tensor:
        """As ``Steps.step``.

        Raises:
            NotImplementedError: the model does not call its layers as it did when it was recorded.
        """
        layer, pool = self._layer, self._pool
        pool.check(layer, recurrence)
        self._layer += 1
        rows = given.float()
        noted = pool.noted(layer, rows, self._most_rows)
        made = recurrence.compute(self._order, pool.states[layer], torch.cat([noted[self._taken], rows]))
        noted[: len(rows)].copy_(rows)
        return made.to(given.dtype)


class SteppedPass:
    """Implements ``FixedPass``: one whose layers have states as well.

    Attributes:
        inner: all that is no state.
        steps: the states' part.
    """

    def __init__(self, inner: FixedPass, steps: CapturedSteps) -> None:
        self.inner, self.steps = inner, steps

    @property
    def tokens(self) -> torch.Tensor:
        return self.inner.tokens

    @property
    def positions(self) -> torch.Tensor:
        return self.inner.positions

    def fill(self, batch: Sequence[Rows]) -> None:
        self.inner.fill(batch)
        self.steps.fill(batch)

    def enter(self) -> None:
        self.inner.enter()

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.inner.attend(call, query, key, value)


class SteppedBuckets:
    """Implements ``Buckets``: those of ``inner``, for passes whose states fit.

    Args:
        requests: most of a pass.
    """

    def __init__(self, inner: Buckets, pool: StatePool, requests: int) -> None:
        self._inner, self._pool, self._requests, self._most_rows = inner, pool, requests, 0
        self._steps: dict[Hashable, CapturedSteps] = {}

    def allowed(self, largest: Largest) -> Sequence[Hashable]:
        self._most_rows = noted_rows(largest)
        return self._inner.allowed(largest)

    def bucket(self, batch: Sequence[Rows]) -> Hashable | None:
        found = self._inner.bucket(batch)
        steps = self._steps.get(found)
        return found if steps is not None and steps.fits(batch) else None

    def make(self, bucket: Any) -> SteppedPass:
        inner = self._inner.make(bucket)
        made = SteppedPass(
            inner, CapturedSteps(self._pool, len(inner.tokens), self._requests, max(self._most_rows, len(inner.tokens)))
        )
        self._steps[bucket] = made.steps
        return made


def stepped(buckets: Buckets, pool: StatePool | None, requests: int) -> Buckets:
    """Buckets of passes whose layers have these states, if they have some; ``requests``: most of a pass."""
    return buckets if pool is None else SteppedBuckets(buckets, pool, requests)


def unwrapped(laid_out: Pass) -> tuple[Pass, Steps | None]:
    """A pass without its states, and what answers the layers that have some."""
    if not isinstance(laid_out, SteppedPass):
        return laid_out, None
    return laid_out.inner, laid_out.steps.running()
