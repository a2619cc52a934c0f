"""Orders to the other pipeline stages, encoded as numbers. The verifier gives them; it holds the last stage.

One message precedes each pass, with everything opened, grown, kept and closed since the pass before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice

import torch

from services.verifier.choosing.sought import WHOLE_ROWS, Sought
from services.verifier.model.target_port import Rows


class Op(IntEnum):
    """The kinds of orders; ``Orders`` says which numbers follow each."""

    OPEN = 1
    GROW = 2
    KEEP = 3
    CLOSE = 4
    PASS = 5
    STOP = 6
    BEAT = 7
    LOAD_STATE = 8
    SAVE_STATE = 9
    ADAPT = 10
    DROP_ADAPTER = 11
    DRAFT_BY = 12
    EXCHANGE = 13
    DROP_WEIGHTS = 14


class Orders:
    """Collects orders as numbers. Requests are numbered too, since an id is text of any length."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._requests: dict[str, int] = {}
        self._next = 0

    def open(self, request_id: str, shared: int, blocks: Sequence[int]) -> None:
        """Open a request; its first ``shared`` blocks already hold its tokens."""
        self._requests[request_id] = self._next
        self.numbers += (Op.OPEN, self._next, shared, len(blocks), *blocks)
        self._next += 1

    def grow(self, request_id: str, blocks: Sequence[int]) -> None:
        """Give a request more blocks."""
        self.numbers += (Op.GROW, self._requests[request_id], len(blocks), *blocks)

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        """As ``Target.keep``."""
        self.numbers += (Op.KEEP, self._requests[request_id], context, len(rows), *rows)

    def load_state(self, request_id: str, length: int, kept: int) -> None:
        """As ``StatePool.load``."""
        self.numbers += (Op.LOAD_STATE, self._requests[request_id], length, kept)

    def save_state(self, request_id: str, length: int, kept: int) -> None:
        """As ``StatePool.save``."""
        self.numbers += (Op.SAVE_STATE, self._requests[request_id], length, kept)

    def close(self, request_id: str) -> None:
        """Close a request; unknown ones are fine."""
        number = self._requests.pop(request_id, None)
        if number is not None:
            self.numbers += (Op.CLOSE, number)

    def adapt(self, request_id: str, adapter: int) -> None:
        """Compute a request with the adapter of that number, which every stage has loaded."""
        self.numbers += (Op.ADAPT, self._requests[request_id], adapter)

    def drop_adapter(self, adapter: int) -> None:
        """Drop an adapter, which no request may have; one that is not there is fine."""
        self.numbers += (Op.DROP_ADAPTER, adapter)

    def draft_by(self, adapter: int) -> None:
        """Compute rows of noise with the adapter of that number, which every stage has loaded."""
        self.numbers += (Op.DRAFT_BY, adapter)

    def exchange(self, weights: int) -> None:
        """Compute by the weights of that number, which every process holds, and hold those that served."""
        self.numbers += (Op.EXCHANGE, weights)

    def drop_weights(self, weights: int) -> None:
        """Forget the weights held under that number; none are fine."""
        self.numbers += (Op.DROP_WEIGHTS, weights)

    def run(self, batch: Sequence[Rows], sought: Sought = WHOLE_ROWS, version: int = 0) -> None:
        """Run a pass; ``sought`` as in ``ModelSlice.run``, ``version`` as in ``Version``."""
        told = (version, *sought.numbers())
        self.numbers += (Op.PASS, len(told), *told, len(batch))
        for rows in batch:
            self.numbers += (self._requests[rows.request_id], rows.context)
            self.numbers += (len(rows.tokens), len(rows.parents), len(rows.layers), len(rows.noise), rows.read)
            self.numbers += (*rows.tokens, *rows.parents, *rows.layers, *rows.noise)

    def beat(self) -> None:
        """Ask every stage whether it is there. By hand: gloo and NCCL notice a lost peer only in a call to it."""
        self.numbers.append(Op.BEAT)

    def take(self) -> torch.Tensor:
        """All orders so far, [numbers], int64; the collection is empty afterwards."""
        numbers, self.numbers = self.numbers, []
        return torch.tensor(numbers, dtype=torch.int64)


Order = tuple[Op, tuple[int, ...], tuple[Rows, ...]]


def read_orders(numbers: Iterable[int]) -> Iterator[Order]:
    """Decode orders: (kind, its arguments, the rows of a pass). Requests are named by their numbers.

    Raises:
        ValueError: the numbers are no orders.
    """
    stream = iter(numbers)

    def some(count: int) -> tuple[int, ...]:
        taken = tuple(islice(stream, count))
        if len(taken) < count:
            raise ValueError("an order ends too early")
        return taken

    for number in stream:
        op = Op(number)
        if op is Op.PASS:
            batch = []
            told = some(*some(1))
            (entries,) = some(1)
            for _ in range(entries):
                request, context, tokens, parents, layers, noise, read = some(7)
                batch.append(
                    Rows(
                        request_id=str(request),
                        context=context,
                        tokens=some(tokens),
                        parents=some(parents),
                        logits=read,
                        layers=some(layers),
                        noise=some(noise),
                    )
                )
            yield op, told, tuple(batch)
        elif op in (Op.OPEN, Op.KEEP):
            request, number, count = some(3)
            yield op, (request, number, *some(count)), ()
        elif op is Op.GROW:
            request, count = some(2)
            yield op, (request, *some(count)), ()
        elif op in (Op.LOAD_STATE, Op.SAVE_STATE):
            yield op, some(3), ()
        elif op is Op.ADAPT:
            yield op, some(2), ()
        else:
            yield op, some(0 if op in (Op.STOP, Op.BEAT) else 1), ()
