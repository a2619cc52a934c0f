"""What the verifier tells the other stages of its target, and what travels between them.

Orders go from the verifier, which holds the last stage, to every other stage: one message before each pass, with all that
was opened, kept and closed since the pass before. Hidden states go from stage to stage, behind a header that says whether
the stage still agrees on the length of every request.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Protocol

import torch

from services.verifier.config import TargetConfig
from services.verifier.stages.exchange import Exchange, Meeting, Sent
from speculation.errors import Internal, TargetLost
from speculation.ports import Rows

FIRST = 0


class Op(IntEnum):
    """Orders: numbers follow, see ``Orders``."""

    OPEN = 1
    GROW = 2
    KEEP = 3
    CLOSE = 4
    PASS = 5
    STOP = 6


class Health(IntEnum):
    """How a pass went in a stage and in those before it."""

    FINE = 0
    FAILED = 1
    DISAGREES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """What a process must know to be stage ``stage``."""

    config: TargetConfig
    stage: int
    host: str
    port: int


class StageHandle(Protocol):
    """A stage's process."""

    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def stop(self) -> None:
        """End it, if it has not ended."""
        ...


Launch = Callable[[StageSpec], StageHandle]


class Orders:
    """Orders on their way, as numbers. Sessions have numbers too: an id is text of any length."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._sessions: dict[str, int] = {}
        self._next = 0

    def open(self, session_id: str, shared: int, tiles: Sequence[int]) -> None:
        """A new session; its first ``shared`` tiles hold its tokens already."""
        self._sessions[session_id] = self._next
        self.numbers += (Op.OPEN, self._next, shared, len(tiles), *tiles)
        self._next += 1

    def grow(self, session_id: str, tiles: Sequence[int]) -> None:
        """More tiles."""
        self.numbers += (Op.GROW, self._sessions[session_id], len(tiles), *tiles)

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """As in ``Target``."""
        self.numbers += (Op.KEEP, self._sessions[session_id], context, len(rows), *rows)

    def close(self, session_id: str) -> None:
        """Unknown sessions are fine."""
        number = self._sessions.pop(session_id, None)
        if number is not None:
            self.numbers += (Op.CLOSE, number)

    def run(self, batch: Sequence[Rows]) -> None:
        """A pass."""
        self.numbers += (Op.PASS, len(batch))
        for rows in batch:
            self.numbers += (self._sessions[rows.session_id], rows.context, len(rows.tokens), len(rows.parents))
            self.numbers += (*rows.tokens, *rows.parents)

    def take(self) -> torch.Tensor:
        """All of them, as one tensor."""
        numbers, self.numbers = self.numbers, []
        return torch.tensor(numbers, dtype=torch.int64)


Order = tuple[Op, tuple[int, ...], tuple[Rows, ...]]


def read_orders(numbers: Iterable[int]) -> Iterator[Order]:
    """Orders from their numbers: (what, its arguments, the rows of a pass). Sessions are named by their numbers.

    Raises:
        ValueError: they are no orders.
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
            for _ in range(some(1)[0]):
                session, context, tokens, parents = some(4)
                batch.append(
                    Rows(session_id=str(session), context=context, tokens=some(tokens), parents=some(parents), logits=0)
                )
            yield op, (), tuple(batch)
        elif op in (Op.OPEN, Op.KEEP):
            session, number, count = some(3)
            yield op, (session, number, *some(count)), ()
        elif op is Op.GROW:
            session, count = some(2)
            yield op, (session, *some(count)), ()
        else:
            yield op, some(1 if op is Op.CLOSE else 0), ()


class Upstream:
    """The verifier's side: all stages but its own, as one.

    Raises:
        ConfigurationError: a stage cannot serve; with its reason.
        TargetLost: a stage has died.
    """

    def __init__(self, config: TargetConfig, launch: Launch) -> None:
        self.orders = Orders()
        self._meeting = Meeting(config.stage_host)
        specs = [
            StageSpec(config=config, stage=stage, host=self._meeting.host, port=self._meeting.port)
            for stage in range(config.stages - 1)
        ]
        self._stages: list[StageHandle] = []
        self._exchange: Exchange | None = None
        self._under_way: deque[tuple[int, list[Sent]]] = deque()
        self._size = config.stages
        try:
            for spec in specs:
                self._stages.append(launch(spec))
        except BaseException:
            self.stop()
            raise

    def join(self) -> None:
        """Wait until every stage is loaded."""
        try:
            self._exchange = self._meeting.join(self._size, lambda stage: self._stages[stage].alive())
        except BaseException:
            self.stop()
            raise

    def begin(self, batch: Sequence[Rows]) -> None:
        """Send a pass on its way."""
        self.orders.run(batch)
        # Not waited for: a stage that is sending what the verifier has not received yet does not listen.
        self._under_way.append((sum(len(rows.tokens) for rows in batch), self._tell()))

    def finish(self, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """What the stages have made of the oldest pass: [rows, hidden size].

        Raises:
            Internal: a stage has failed.
            TargetLost: a stage has died, or disagrees on a length.
        """
        assert self._exchange is not None
        rows, sent = self._under_way.popleft()
        hidden = receive_hidden(self._exchange, rows, hidden_size, dtype)
        for order in sent:
            order.wait()
        return hidden

    def stop(self) -> None:
        """End all stages."""
        # Held until the stages have ended: what is on its way must not be freed.
        sent = []
        if self._exchange is not None:
            for stage in range(self._size - 1):
                with contextlib.suppress(TargetLost):
                    sent += [self._exchange.send(part, stage) for part in (torch.tensor([1]), torch.tensor([Op.STOP]))]
        for process in self._stages:
            process.stop()

    def _tell(self) -> list[Sent]:
        assert self._exchange is not None
        message = self.orders.take()
        parts = (torch.tensor([len(message)]), message)
        return [self._exchange.send(part, stage) for stage in range(self._size - 1) for part in parts]


def send_hidden(exchange: Exchange, health: Health, hidden: torch.Tensor | None) -> None:
    """Hand a pass on to the next stage; nothing but the header where it has failed."""
    exchange.send(torch.tensor([health, 0 if hidden is None else len(hidden)]), exchange.rank + 1).wait()
    if hidden is not None:
        exchange.send(hidden.contiguous(), exchange.rank + 1).wait()


def receive_hidden(exchange: Exchange, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A pass from the stage before: [rows, hidden size].

    Raises:
        Internal: it failed there.
        TargetLost: the stages disagree.
    """
    header = torch.empty(2, dtype=torch.int64)
    exchange.receive(header, exchange.rank - 1)
    health, count = Health(int(header[0])), int(header[1])
    if health is Health.FAILED:
        raise Internal("a stage of the target failed; its log says why")
    if health is Health.DISAGREES or count != rows:
        raise TargetLost("the stages of the target disagree on what was committed")
    hidden = torch.empty(rows, hidden_size, dtype=dtype)
    exchange.receive(hidden, exchange.rank - 1)
    return hidden
