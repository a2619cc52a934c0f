"""All processes of a target but the verifier's own, as one object: earlier stages, and further ranks of the last one."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from services.verifier.choosing.sought import WHOLE_ROWS, Sought
from services.verifier.config import TargetConfig
from services.verifier.model.target_port import Rows
from services.verifier.stages.activations import Activations, receive_activations, receive_beat
from services.verifier.stages.beside import Asking
from services.verifier.stages.exchange import Exchange, Meeting, Sent
from services.verifier.stages.no_stages import NoStages
from services.verifier.stages.orders import Op, Orders
from services.verifier.stages.same_weights import NOTHING_READ, FilesRead, OwnFiles
from services.verifier.stages.settling import Decide, keep_settled, settle
from services.verifier.stages.split_adapters import SplitAdapters
from services.verifier.stages.split_weights import R, Read, SplitWeights
from speculation.errors import ConfigurationError, TargetLost

if TYPE_CHECKING:
    from services.verifier.model.slice import ModelSlice

# Seconds that all stages together have to end by themselves.
_PATIENCE_S = 5.0
# The name of the adapter of rows of noise; those of requests are not empty.
_OF_NOISE = ""
# Seconds in which they must answer a question that needs no computing.
_BEAT_S = 10.0
# And in which they must have exchanged their weights. Whoever orders it waits 60.
_EXCHANGE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """What a process must know to be a rank of pipeline stage ``stage``.

    Attributes:
        files: the verifier's ``files_told``.
    """

    config: TargetConfig
    stage: int
    host: str
    port: int
    rank: int = 0
    files: str = ""

    @property
    def process(self) -> int:
        """Its number among the target's processes, see ``Exchange``."""
        return self.stage * self.config.tensor_parallel_size + self.rank


class StageHandle(Protocol):
    """A stage's process."""

    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def stop(self, patience_s: float) -> None:
        """Wait at most ``patience_s`` seconds for it to end, then kill it."""
        ...


Launch = Callable[[StageSpec], StageHandle]


class EarlierStages(Protocol):
    """The pipeline stages before the last one, and its further ranks, as the verifier sees them; requests and rows as in
    ``Target``.

    Attributes:
        files: tells the files that they read their weights from; empty: there are no others.
    """

    files: str

    def claim(self, device: torch.device) -> None:
        """Claim the last stage's GPU, before it is loaded there.

        Raises:
            ConfigurationError: another stage has claimed it.
        """
        ...

    def settle(self, own: str, decide: Decide) -> str:
        """What ``decide`` makes of what every process has found, this one last, while they load; see ``settling``.

        Raises:
            ConfigurationError: a stage cannot serve; gives the reason.
            TargetLost: a stage has died.
        """
        ...

    def keep_settled(self, decision: str) -> None:
        """Tell processes that are started anew what was settled before."""
        ...

    def join(self, part: ModelSlice) -> None:
        """Wait until every stage is loaded, and connect the ranks of the last one.

        Args:
            part: the verifier's part of the last stage.

        Raises:
            ConfigurationError: a stage cannot serve, or two are on one GPU; gives the reason.
            TargetLost: a stage has died.
        """
        ...

    def open(self, request_id: str, shared: int, blocks: Sequence[int]) -> None:
        """Open a request; its first ``shared`` blocks already hold its tokens."""
        ...

    def grow(self, request_id: str, blocks: Sequence[int]) -> None:
        """Give a request more blocks."""
        ...

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        """As ``Target.keep``."""
        ...

    def load_state(self, request_id: str, length: int, kept: int) -> None:
        """As ``StatePool.load``, of the request just opened."""
        ...

    def save_state(self, request_id: str, length: int, kept: int) -> None:
        """As ``StatePool.save``."""
        ...

    def close(self, request_id: str) -> None:
        """Close a request; unknown ones are fine."""
        ...

    def load_adapter(self, name: str, folder: str, digest: str) -> None:
        """Have an adapter loaded, and wait for it. One call at a time, in any thread; passes may run.

        Raises:
            ConfigurationError: a stage cannot; says which one and why. None keeps it.
            TargetLost: a stage has died.
        """
        ...

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter, which no request may have; an unknown one is fine. May be called in any thread."""
        ...

    def adapt(self, request_id: str, name: str) -> None:
        """Compute the request just opened with an adapter that is loaded."""
        ...

    def draft_by(self, folder: str, digest: str) -> None:
        """Have the adapter of rows of noise loaded, and wait for it; as ``load_adapter``."""
        ...

    def load_weights(self, folder: Path, own: Callable[[str], R]) -> R:
        """Have new weights read; as ``SplitWeights.load``."""
        ...

    def exchange(self, weights: Read, part: ModelSlice) -> None:
        """Exchange weights with those that serve, and wait until all have; no pass is under way. ``part``: as in ``join``.

        Raises:
            TargetLost: one has died or does not answer, or they do not hold them, as they were started anew since.
        """
        ...

    def begin(self, batch: Sequence[Rows], sought: Sought = WHOLE_ROWS) -> None:
        """Start a pass; ``sought`` as in ``ModelSlice.run``."""
        ...

    def finish(self, part: ModelSlice) -> Activations:
        """The input of ``part``, the last stage, in the oldest pass.

        Raises:
            Internal: a stage has failed.
            TargetLost: a stage has died, does not answer, or disagrees on a length.
        """
        ...

    def beat(self, part: ModelSlice) -> None:
        """Make sure that all stages and ranks answer; no pass is under way. ``part``: as in ``join``.

        Raises:
            TargetLost: one has died or does not answer.
        """
        ...

    def stop(self) -> None:
        """End all stages."""
        ...


class Upstream:
    """Implements ``EarlierStages`` for stages in processes of their own.

    They are told what was opened, grown, kept and closed with the next pass.

    Args:
        files: those that the verifier's own part was read from before.

    Raises:
        ConfigurationError: they have other bytes now.
    """

    def __init__(self, config: TargetConfig, launch: Launch, files: FilesRead = NOTHING_READ) -> None:
        self._orders = Orders()
        self._meeting = Meeting(config.stage_host)
        self._timeout_s = config.pass_timeout_s
        self._ranks, folder = config.tensor_parallel_size, Path(config.model_path)
        self._own = OwnFiles(folder)
        self.files = self._own.told
        if not files.same_in(folder, self.files):
            raise ConfigurationError(
                f"the files in {folder} are not those that the verifier has read, and stages that are started anew "
                "would compute by these: start the verifier anew",
                about=str(folder),
            )
        places = [(stage, rank) for stage in range(config.stages) for rank in range(self._ranks)]
        # The last one is the verifier's own.
        specs = [
            StageSpec(
                config=config, stage=stage, rank=rank, host=self._meeting.host, port=self._meeting.port, files=self.files
            )
            for stage, rank in places[:-1]
        ]
        self._stages: list[StageHandle] = []
        self._stopped = False
        self._exchange: Exchange | None = None
        self._under_way: deque[tuple[Sequence[Rows], list[Sent]]] = deque()
        self._size = config.processes
        asking = Asking(self._meeting.store, range(self._size - 1), self._runs, self._ranks)
        self._adapters, self._weights = SplitAdapters(asking), SplitWeights(asking)
        try:
            for spec in specs:
                self._stages.append(launch(spec))
        except BaseException:
            self.stop()
            raise

    def claim(self, device: torch.device) -> None:
        self._meeting.claim(self._size - 1, self._size, device)

    def settle(self, own: str, decide: Decide) -> str:
        return settle(self._meeting.store, self._size, self._ranks, self._runs, own, decide)

    def keep_settled(self, decision: str) -> None:
        keep_settled(self._meeting.store, decision)

    def join(self, part: ModelSlice) -> None:
        self._exchange = self._meeting.join(
            self._size, self._runs, self._timeout_s, part.device, ranks=self._ranks, check=self._own.check
        )
        if part.adapters is not None:
            self._adapters.join(part.adapters)
        part.connect(self._exchange)

    def open(self, request_id: str, shared: int, blocks: Sequence[int]) -> None:
        self._orders.open(request_id, shared, blocks)

    def grow(self, request_id: str, blocks: Sequence[int]) -> None:
        self._orders.grow(request_id, blocks)

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        self._orders.keep(request_id, context, rows)

    def load_state(self, request_id: str, length: int, kept: int) -> None:
        self._orders.load_state(request_id, length, kept)

    def save_state(self, request_id: str, length: int, kept: int) -> None:
        self._orders.save_state(request_id, length, kept)

    def close(self, request_id: str) -> None:
        self._orders.close(request_id)

    def load_adapter(self, name: str, folder: str, digest: str) -> None:
        self._adapters.load(name, folder, digest)

    def drop_adapter(self, name: str) -> None:
        self._adapters.drop(name)

    def adapt(self, request_id: str, name: str) -> None:
        self._orders.adapt(request_id, self._adapters.number_of(name))

    def draft_by(self, folder: str, digest: str) -> None:
        self._adapters.load(_OF_NOISE, folder, digest)
        self._orders.draft_by(self._adapters.number_of(_OF_NOISE))

    def load_weights(self, folder: Path, own: Callable[[str], R]) -> R:
        return self._weights.load(folder, own)

    def exchange(self, weights: Read, part: ModelSlice) -> None:
        if (number := self._weights.number_of(weights)) is None:
            # They would compute by others than the verifier, under the same number.
            self._stopped = True
            raise TargetLost("the stages do not hold the weights, as they were started anew since these were read")
        self._orders.exchange(number)
        self._weights.version.exchange(number)
        self._beat(part, _EXCHANGE_S)

    def begin(self, batch: Sequence[Rows], sought: Sought = WHOLE_ROWS) -> None:
        self._orders.run(batch, sought, self._weights.version.now)
        # Not waited for: a stage does not listen while it is sending something that the verifier has not received yet.
        self._under_way.append((batch, self._tell()))

    def finish(self, part: ModelSlice) -> Activations:
        batch, sent = self._under_way.popleft()
        made = Activations() if part.is_first else receive_activations(self._connected, part, batch)
        for order in sent:
            order.wait()
        return made

    def beat(self, part: ModelSlice) -> None:
        self._beat(part, _BEAT_S)

    def _beat(self, part: ModelSlice, within_s: float) -> None:
        self._orders.beat()
        sent = self._tell()
        if not part.is_first:
            receive_beat(self._connected, within_s)
        if part.shards is not None:
            part.shards.beat(within_s)
        # Each stage has passed the answer on, so it has the question.
        for order in sent:
            order.wait()

    def stop(self) -> None:
        self._stopped = True
        # Referenced until the stages have ended: tensors under way must not be freed.
        sent = []
        if self._exchange is not None:
            for stage in range(self._size - 1):
                with contextlib.suppress(TargetLost):
                    sent += [self._exchange.send(part, stage) for part in (torch.tensor([1]), torch.tensor([Op.STOP]))]
        deadline = time.monotonic() + _PATIENCE_S
        while self._stages:
            self._stages.pop(0).stop(max(0.0, deadline - time.monotonic()))
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _runs(self, stage: int) -> bool:
        """Whether a stage's process runs, and is to."""
        stages = list(self._stages)
        return not self._stopped and stages[stage].alive()

    @property
    def _connected(self) -> Exchange:
        """
        Raises:
            TargetLost: the stages were stopped, or are to be.
        """
        if self._exchange is None or self._stopped:
            raise TargetLost("the stages were stopped")
        return self._exchange

    def _tell(self) -> list[Sent]:
        exchange = self._connected
        for adapter in self._adapters.to_drop():
            self._orders.drop_adapter(adapter)
        for weights in self._weights.to_drop():
            self._orders.drop_weights(weights)
        message = self._orders.take()
        parts = (torch.tensor([len(message)]), message)
        return [exchange.send(part, stage) for stage in range(self._size - 1) for part in parts]


def earlier_stages(config: TargetConfig, launch: Launch | None, files: FilesRead = NOTHING_READ) -> EarlierStages:
    """Start the earlier stages that ``config`` asks for.

    Args:
        files: as in ``Upstream``.

    Raises:
        ConfigurationError: there are some, but no ``launch`` to start them with, or their files have other bytes now.
    """
    if config.processes == 1:
        return NoStages()
    if launch is None:
        field = "stages" if config.stages > 1 else "tensor_parallel_size"
        raise ConfigurationError(
            "nothing here can start processes for them", field=f"verifier.{field}", value=getattr(config, field)
        )
    return Upstream(config, launch, files)
