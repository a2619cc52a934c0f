"""Sends tensors between pipeline stages: torch.distributed, point to point, in groups of their own.

Nothing is unpickled: only tensors of known type and size travel. Anyone who can reach the address can join the group, so it
binds to one interface, loopback unless configured otherwise (SECURITY.md).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from services.machine.sockets import bind
from services.verifier.stages.long_values import get_long, set_long
from services.verifier.stages.settling import IDLE_S, JOIN_TIMEOUT, process_name, told_by
from services.verifier.stages.ways import (
    GLOO,
    NCCL,
    GlooWay,
    NcclWay,
    RankGroup,
    Way,
    gloo_group,
    identity,
    two_on_one,
    way_of,
)
from speculation.errors import ConfigurationError, TargetLost

log = logging.getLogger(__name__)

# A stage other than the verifier's waits for orders as long as there are no requests. If the verifier or another stage dies,
# it notices at once; if one hangs, the verifier ends all of them.
_IDLE_TIMEOUT = timedelta(seconds=IDLE_S)
_CPU = torch.device("cpu")


class Sent:
    """A tensor on its way. It must not change before ``wait`` has returned."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, to: str) -> None:
        self._work, self._tensor, self._to = work, tensor, to

    def wait(self) -> None:
        """Wait until the tensor has arrived.

        Raises:
            TargetLost: the other side cannot be reached.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TargetLost(f"{self._to} cannot be reached") from error


class Exchange:
    """A member of a group of ``size`` processes: the ranks of the first stage, then those of the next one, and so on.

    The last rank of the last stage is the verifier itself.

    Args:
        ranks: of each stage.
        timeout: longest wait for another stage during a pass.
        way: by which activations travel, ``GLOO`` or ``NCCL``.
        device: where this stage computes.

    Attributes:
        rank_group: by which the ranks of this stage exchange what their GPUs make; None: they do it by ``send_shard``.
    """

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        size: int,
        timeout: timedelta,
        way: str = GLOO,
        device: torch.device = _CPU,
        ranks: int = 1,
    ) -> None:
        self.rank, self.size, self._ranks = rank, size, ranks
        self._timeout = timeout
        group = gloo_group(store, rank, size, timeout)
        self._orders, self._shards = GlooWay(group), GlooWay(group, tag=1)
        self._activations: Way = NcclWay(store, rank, size, device) if way == NCCL else self._orders
        self.rank_group = RankGroup(store, *divmod(rank, ranks), ranks) if way == NCCL and ranks > 1 else None

    @property
    def siblings(self) -> range:
        """The ranks of this stage, this one included."""
        first = self.rank - self.rank % self._ranks
        return range(first, first + self._ranks)

    @property
    def before(self) -> int:
        """The process with the same shard in the stage before."""
        return self.rank - self._ranks

    @property
    def behind(self) -> int:
        """The process with the same shard in the next stage."""
        return self.rank + self._ranks

    def send(self, tensor: torch.Tensor, rank: int) -> Sent:
        """Start to send a contiguous CPU tensor; it leaves when the other side receives.

        Raises:
            TargetLost: the other side is gone.
        """
        return self._sent(self._orders, tensor, rank)

    def receive(self, tensor: torch.Tensor, rank: int, within_s: float | None = None) -> None:
        """Fill ``tensor``, on the CPU, with the next one from ``rank``.

        Args:
            within_s: longest wait; None: as long as a pass may take.

        Raises:
            TargetLost: the other side is gone, or takes longer.
        """
        self._receive(self._orders, tensor, rank, within_s)

    def ready(self, made: torch.Tensor | None) -> torch.Tensor | None:
        """An activation as it travels. Has been computed when this returns, so a failure on a GPU shows here."""
        if made is None:
            return None
        moved = made.to(self._activations.device).contiguous()
        if moved.device.type == "cuda":
            torch.cuda.current_stream(moved.device).synchronize()
        return moved

    def send_activation(self, made: torch.Tensor, rank: int) -> Sent:
        """As ``send``, for what ``ready`` returned."""
        return self._sent(self._activations, made, rank)

    def receive_activation(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """The next activation from ``rank``, where the way brings it.

        Raises:
            TargetLost: the other side is gone, or takes longer than a pass may.
        """
        made = torch.empty(*shape, dtype=dtype, device=self._activations.device)
        self._receive(self._activations, made, rank, None)
        return made

    def send_shard(self, own: torch.Tensor, rank: int) -> Sent:
        """As ``send``, of what the ranks of a stage gather; apart from orders, which may be on their way already."""
        return self._sent(self._shards, own, rank)

    def receive_shard(self, place: torch.Tensor, rank: int, within_s: float | None) -> None:
        """Fill ``place`` with what ``rank`` has sent by ``send_shard``; as ``receive``."""
        self._receive(self._shards, place, rank, within_s)

    def close(self) -> None:
        """Leave, without a wait for others."""
        self._activations.close()
        if self.rank_group is not None:
            self.rank_group.close()

    def _sent(self, way: Way, tensor: torch.Tensor, rank: int) -> Sent:
        name = process_name(rank, self._ranks)
        try:
            return Sent(way.send(tensor, rank), tensor, name)
        except RuntimeError as error:
            raise TargetLost(f"{name} cannot be reached") from error

    def _receive(self, way: Way, tensor: torch.Tensor, rank: int, within_s: float | None) -> None:
        start = time.monotonic()
        timeout = self._timeout if within_s is None else timedelta(seconds=within_s)
        try:
            way.receive(tensor, rank, timeout)
        except RuntimeError as error:
            waited = timedelta(seconds=time.monotonic() - start)
            setting = " (pass_timeout_s)" if within_s is None else ""
            late = f"has not answered for {timeout.total_seconds():g} s{setting}"
            name = process_name(rank, self._ranks)
            raise TargetLost(f"{name} {late if waited >= timeout else 'is gone'}") from error


class Meeting:
    """Where the stages of one target find each other; held by the verifier."""

    def __init__(self, host: str) -> None:
        listener = _listen(host)
        self.host, self.port = host, int(listener.getsockname()[1])
        self._store = TCPStore(
            host, self.port, None, True, JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @property
    def store(self) -> TCPStore:
        """What all stages read and write."""
        return self._store

    def claim(self, rank: int, size: int, device: torch.device) -> None:
        """Claim a GPU before anything is loaded there; see ``claim_gpu``, which the other stages call."""
        _claim(self._store, rank, size, identity(device))

    def join(
        self,
        size: int,
        alive: Callable[[int], bool],
        timeout_s: float,
        device: torch.device = _CPU,
        *,
        ranks: int = 1,
        check: Callable[[str, str], None] | None = None,
    ) -> Exchange:
        """Wait, without a limit, until every stage has loaded its layers.

        Args:
            size: number of processes, this one included.
            ranks: of each stage.
            check: raises ConfigurationError if a process, by the name that errors give it, has read other weights than the
                verifier by what it tells of them.
            alive: whether a stage's process still runs.
            timeout_s: longest wait for a stage during a pass, in seconds; after that the stage counts as lost.
            device: where the last stage computes.

        Raises:
            ConfigurationError: a stage cannot serve, two are on one GPU, or one has other weights; gives the reason.
            TargetLost: a stage has died.
        """
        try:
            for rank in range(size - 1):
                told_by(self._store, "ready", rank, ranks, alive)
            self._check_weights(size, ranks, check)
            way = self._way([self._store.get(f"gpu/{rank}").decode() for rank in range(size - 1)] + [identity(device)])
            log.info("activations travel between %d processes by %s", size, way)
            _choose_interface(self.host, self.port)
            return Exchange(self._store, size - 1, size, timedelta(seconds=timeout_s), way, device, ranks)
        except RuntimeError as error:
            raise TargetLost("a stage has died while the stages were connecting") from error

    def _check_weights(self, size: int, ranks: int, check: Callable[[str, str], None] | None) -> None:
        """Check that all have loaded the same weights.

        Raises:
            ConfigurationError: they have not; the stages are told to end.
        """
        if check is None:
            return
        try:
            for rank in range(size - 1):
                check(process_name(rank, ranks), get_long(self._store, f"weights/{rank}"))
        except BaseException:
            self._store.set("way", "")
            raise

    def _way(self, identities: Sequence[str]) -> str:
        """What every stage is told about how activations travel.

        Raises:
            ConfigurationError: see ``way_of``; the stages are told to end.
        """
        way = ""
        try:
            way = way_of(identities)
        finally:
            self._store.set("way", way)
        return way


def claim_gpu(host: str, port: int, rank: int, size: int, device: torch.device) -> None:
    """Claim the GPU on which a stage is to be loaded, so that no second one runs out of memory there while it loads.

    Raises:
        ConfigurationError: another stage has claimed it.
        TargetLost: the verifier cannot be reached.
    """
    if not (own := identity(device)):
        return
    try:
        _claim(TCPStore(host, port, None, False, JOIN_TIMEOUT), rank, size, own)
    except RuntimeError as error:
        raise TargetLost(f"no verifier at {host}:{port}") from error


def _claim(store: TCPStore, rank: int, size: int, own: str) -> None:
    """Claim a GPU by its identity; that of a CPU is empty."""
    first = int(store.compare_set(f"on/{own}", "", str(rank))) if own else rank
    if first != rank:
        raise two_on_one(size, first, rank, own)


def attend_meeting(
    host: str,
    port: int,
    rank: int,
    size: int,
    device: torch.device = _CPU,
    refusal: str = "",
    *,
    ranks: int = 1,
    weights: str = "",
) -> Exchange | None:
    """A stage's side of ``Meeting.join``; None if the stages cannot serve together.

    With a ``refusal``, it only tells the verifier why it cannot serve.

    Args:
        device: where the stage computes.
        ranks: see there.
        weights: what the verifier is told of those that this process has loaded.

    Raises:
        TargetLost: the verifier cannot be reached.
    """
    try:
        store = TCPStore(host, port, None, False, JOIN_TIMEOUT)
        store.set(f"gpu/{rank}", "" if refusal else identity(device))
        set_long(store, f"weights/{rank}", weights)
        store.set(f"ready/{rank}", refusal)
        if refusal:
            return None
        # Until all others have loaded their layers.
        store.wait(["way"], _IDLE_TIMEOUT)
        if not (way := store.get("way").decode()):
            return None
        _choose_interface(host, port)
        return Exchange(store, rank, size, _IDLE_TIMEOUT, way, device, ranks)
    except RuntimeError as error:
        raise TargetLost(f"no verifier at {host}:{port}") from error


def _listen(host: str) -> socket.socket:
    """A listening socket on a free port of one of this machine's interfaces.

    Raises:
        ConfigurationError: ``host`` is no address of this machine.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        listener = bind(family, (host, 0))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            field="verifier.stage_host",
            value=host,
            allowed=f"the address of one of this machine's interfaces, such as 127.0.0.1 ({error})",
        ) from error
    listener.listen(64)
    return listener


def _choose_interface(host: str, port: int) -> None:
    """Make gloo and NCCL listen on the interface that leads to ``host``, not on one of their own choice.

    They read the environment variables when a group is made. One that is already named for NCCL stays.
    """
    # Imported here, so that a target of one stage needs only torch and transformers (benchmarks/step_cost.py).
    import psutil

    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        # Nothing is sent: connecting only tells which of this machine's addresses leads there.
        way.connect((host, port))
        own = way.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return
