"""Sends tensors between pipeline stages: torch.distributed's gloo, point to point, in a group of its own.

Nothing is unpickled: only tensors of known type and size travel. Anyone who can reach the address can join the group, so it
binds to one interface, loopback unless configured otherwise (SECURITY.md).
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not exported in their types

from speculation.errors import ConfigurationError, TargetLost

# A stage other than the verifier's waits for orders as long as there are no requests. If the verifier or another stage dies,
# it notices at once; if one hangs, the verifier ends all of them.
_IDLE_TIMEOUT = timedelta(days=365)
_JOIN_TIMEOUT = timedelta(seconds=60)
_POLL_S = 0.05


class Sent:
    """A tensor on its way. It must not change before ``wait`` has returned."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, rank: int) -> None:
        self._work, self._tensor, self._rank = work, tensor, rank

    def wait(self) -> None:
        """Wait until the tensor has arrived.

        Raises:
            TargetLost: the other side cannot be reached.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TargetLost(f"stage {self._rank} cannot be reached") from error


class Exchange:
    """A member of a group of ``size`` stages. Rank 0 is the first stage; the last one is the verifier itself."""

    def __init__(self, store: TCPStore, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout
        # Its own methods are missing in torch's types.
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def send(self, tensor: torch.Tensor, rank: int) -> Sent:
        """Start to send a contiguous CPU tensor; it leaves when the other side receives.

        Raises:
            TargetLost: the other side is gone.
        """
        try:
            return Sent(self._group.send([tensor], rank, 0), tensor, rank)
        except RuntimeError as error:
            raise TargetLost(f"stage {rank} cannot be reached") from error

    def receive(self, tensor: torch.Tensor, rank: int, within_s: float | None = None) -> None:
        """Fill ``tensor`` with the next one from ``rank``.

        Args:
            within_s: longest wait; None: as long as a pass may take.

        Raises:
            TargetLost: the other side is gone, or takes longer.
        """
        start = time.monotonic()
        timeout = self._timeout if within_s is None else timedelta(seconds=within_s)
        try:
            self._group.recv([tensor], rank, 0).wait(timeout)
        except RuntimeError as error:
            waited = timedelta(seconds=time.monotonic() - start)
            setting = " (pass_timeout_s)" if within_s is None else ""
            late = f"has not answered for {timeout.total_seconds():g} s{setting}"
            raise TargetLost(f"stage {rank} {late if waited >= timeout else 'is gone'}") from error


class Meeting:
    """Where the stages of one target find each other; held by the verifier."""

    def __init__(self, host: str) -> None:
        listener = _listen(host)
        self.host, self.port = host, int(listener.getsockname()[1])
        self._store = TCPStore(
            host, self.port, None, True, _JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def join(self, size: int, alive: Callable[[int], bool], timeout_s: float) -> Exchange:
        """Wait, without a limit, until every stage has loaded its layers.

        Args:
            alive: whether a stage's process still runs.
            timeout_s: longest wait for a stage during a pass, in seconds; after that the stage counts as lost.

        Raises:
            ConfigurationError: a stage cannot serve; gives its reason.
            TargetLost: a stage has died.
        """
        try:
            for rank in range(size - 1):
                while not self._store.check([f"ready/{rank}"]):
                    if not alive(rank):
                        raise TargetLost(f"stage {rank} has died while it was loading; its log says why")
                    time.sleep(_POLL_S)
                if reason := self._store.get(f"ready/{rank}").decode():
                    raise ConfigurationError(f"stage {rank}: {reason}")
            _choose_interface(self.host, self.port)
            return Exchange(self._store, size - 1, size, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TargetLost("a stage has died while the stages were connecting") from error


def attend_meeting(host: str, port: int, rank: int, size: int, refusal: str = "") -> Exchange | None:
    """A stage's side of ``Meeting.join``. With a ``refusal``, it only tells the verifier why it cannot serve.

    Raises:
        TargetLost: the verifier cannot be reached.
    """
    try:
        store = TCPStore(host, port, None, False, _JOIN_TIMEOUT)
        store.set(f"ready/{rank}", refusal)
        if refusal:
            return None
        _choose_interface(host, port)
        return Exchange(store, rank, size, _IDLE_TIMEOUT)
    except RuntimeError as error:
        raise TargetLost(f"no verifier at {host}:{port}") from error


def _listen(host: str) -> socket.socket:
    """A listening socket on a free port of one of this machine's interfaces.

    Raises:
        ConfigurationError: ``host`` is no address of this machine.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((host, 0))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"stage_host is {host}: must be the address of one of this machine's interfaces, such as 127.0.0.1 ({error})"
        ) from error
    listener.listen(64)
    return listener


def _choose_interface(host: str, port: int) -> None:
    """Make gloo listen on the interface that leads to ``host``, not on the one that this machine's name resolves to.

    Gloo reads the environment variable when a group is made.
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
            return
