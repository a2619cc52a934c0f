"""The pipeline stages before the verifier's own, which is the last one, as one object."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from services.verifier.config import TargetConfig
from services.verifier.stages.activations import Activations, receive_activations
from services.verifier.stages.exchange import Exchange, Meeting, Sent
from services.verifier.stages.orders import Op, Orders
from services.verifier.target_port import Rows
from speculation.errors import ConfigurationError, TargetLost

if TYPE_CHECKING:
    from services.verifier.model_slice import ModelSlice

# All stages together have so long to end of their own accord.
_PATIENCE_S = 5.0


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

    def stop(self, patience_s: float) -> None:
        """Wait so long for its end, and then end it, whatever it does."""
        ...


Launch = Callable[[StageSpec], StageHandle]


class EarlierStages(Protocol):
    """The pipeline stages before the last one, as the last one sees them; sessions and rows as in ``ports.Target``."""

    def join(self) -> None:
        """Wait until every stage is loaded.

        Raises:
            ConfigurationError: a stage cannot serve; with its reason.
            TargetLost: a stage has died.
        """
        ...

    def open(self, session_id: str, shared: int, tiles: Sequence[int]) -> None:
        """A new session; its first ``shared`` tiles hold its tokens already."""
        ...

    def grow(self, session_id: str, tiles: Sequence[int]) -> None:
        """More tiles."""
        ...

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """Of the session's last pass, keep ``rows`` behind ``context``."""
        ...

    def close(self, session_id: str) -> None:
        """Unknown sessions are fine."""
        ...

    def begin(self, batch: Sequence[Rows]) -> None:
        """Send a pass on its way."""
        ...

    def finish(self, part: ModelSlice) -> Activations:
        """What comes of the oldest pass to ``part``, the last stage.

        Raises:
            Internal: a stage has failed.
            TargetLost: a stage has died, does not answer, or disagrees on a length.
        """
        ...

    def stop(self) -> None:
        """End all of them."""
        ...


class NoStages:
    """There are no earlier stages: tokens enter the one that there is. Implements ``EarlierStages``."""

    def join(self) -> None:
        """Nobody to wait for."""

    def open(self, session_id: str, shared: int, tiles: Sequence[int]) -> None:
        """Nobody to tell; nor below."""

    def grow(self, session_id: str, tiles: Sequence[int]) -> None:
        """See ``open``."""

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        """See ``open``."""

    def close(self, session_id: str) -> None:
        """See ``open``."""

    def begin(self, batch: Sequence[Rows]) -> None:
        """See ``open``."""

    def finish(self, part: ModelSlice) -> Activations:
        """Nothing but the tokens."""
        return Activations()

    def stop(self) -> None:
        """Nobody to end."""


class Upstream:
    """Earlier stages in processes of their own. Implements ``EarlierStages``.

    What is opened, kept and closed is told with the next pass.
    """

    def __init__(self, config: TargetConfig, launch: Launch) -> None:
        self._orders = Orders()
        self._meeting = Meeting(config.stage_host)
        self._timeout_s = config.pass_timeout_s
        specs = [
            StageSpec(config=config, stage=stage, host=self._meeting.host, port=self._meeting.port)
            for stage in range(config.stages - 1)
        ]
        self._stages: list[StageHandle] = []
        self._exchange: Exchange | None = None
        self._under_way: deque[tuple[Sequence[Rows], list[Sent]]] = deque()
        self._size = config.stages
        try:
            for spec in specs:
                self._stages.append(launch(spec))
        except BaseException:
            self.stop()
            raise

    def join(self) -> None:
        self._exchange = self._meeting.join(self._size, lambda stage: self._stages[stage].alive(), self._timeout_s)

    def open(self, session_id: str, shared: int, tiles: Sequence[int]) -> None:
        self._orders.open(session_id, shared, tiles)

    def grow(self, session_id: str, tiles: Sequence[int]) -> None:
        self._orders.grow(session_id, tiles)

    def keep(self, session_id: str, context: int, rows: Sequence[int]) -> None:
        self._orders.keep(session_id, context, rows)

    def close(self, session_id: str) -> None:
        self._orders.close(session_id)

    def begin(self, batch: Sequence[Rows]) -> None:
        self._orders.run(batch)
        # Not waited for: a stage that is sending what the verifier has not received yet does not listen.
        self._under_way.append((batch, self._tell()))

    def finish(self, part: ModelSlice) -> Activations:
        assert self._exchange is not None
        batch, sent = self._under_way.popleft()
        made = receive_activations(self._exchange, part, batch)
        for order in sent:
            order.wait()
        return made

    def stop(self) -> None:
        # Held until the stages have ended: what is on its way must not be freed.
        sent = []
        if self._exchange is not None:
            for stage in range(self._size - 1):
                with contextlib.suppress(TargetLost):
                    sent += [self._exchange.send(part, stage) for part in (torch.tensor([1]), torch.tensor([Op.STOP]))]
        deadline = time.monotonic() + _PATIENCE_S
        while self._stages:
            self._stages.pop(0).stop(max(0.0, deadline - time.monotonic()))
        self._exchange = None

    def _tell(self) -> list[Sent]:
        assert self._exchange is not None
        message = self._orders.take()
        parts = (torch.tensor([len(message)]), message)
        return [self._exchange.send(part, stage) for stage in range(self._size - 1) for part in parts]


def earlier_stages(config: TargetConfig, launch: Launch | None) -> EarlierStages:
    """Those that ``config`` asks for, on their way up.

    Raises:
        ConfigurationError: there are some, and nothing to start them with.
    """
    if config.stages == 1:
        return NoStages()
    if launch is None:
        raise ConfigurationError(f"stages is {config.stages}: nothing here starts processes for them")
    return Upstream(config, launch)
