"""The chaos matrix's third arrangement: a Ray of two nodes, each in a network namespace, with a link that is cut and slowed.

::

    users -> router, verifier, ... on node A  <== link ==>  verifier, ... on node B
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from typing_extensions import override

from cluster.ray.on_ray import ENVIRONMENT
from tests.chaos.cells import Plan
from tests.chaos.ray_service import OnRay

_SUBNET = "10.77.0"
_HEAD = f"{_SUBNET}.1:6379"
_NEW_NETWORK = 0x40000000
_NAMES = ("outrider-a", "outrider-b")
# Delays where the kernel can, else little bandwidth with a queue: an answer's tokens get through, much later.
_SLOW = ("netem delay 100ms 50ms", "tbf rate 256kbit burst 4kb latency 400ms")
_NODE_S = 180.0


class NoNamespaces(Exception):
    """Network namespaces cannot be made here; says why."""


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def two_namespaces() -> Iterator[None]:
    """Two namespaces with a link between them. This thread, and what it starts, is in the first one from now on.

    Raises:
        NoNamespaces: they cannot be made, for want of rights or of programs.
    """
    try:
        for number, name in enumerate(_NAMES, 1):
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
            if number == 2:
                _do("ip", "link", "add", "link0", "netns", _NAMES[0], "type", "veth", "peer", "name", "link0", "netns", name)
        for number, name in enumerate(_NAMES, 1):
            _do("ip", "-n", name, "address", "add", f"{_SUBNET}.{number}/24", "dev", "link0")
            _do("ip", "-n", name, "link", "set", "link0", "up")
            # Ray finds its own address by the way that would lead outside.
            _do("ip", "-n", name, "route", "add", "default", "via", f"{_SUBNET}.{3 - number}")
        with Path(f"/run/netns/{_NAMES[0]}").open() as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NETWORK):
                raise NoNamespaces(f"setns: {os.strerror(ctypes.get_errno())}")
        yield
    except OSError as error:
        raise NoNamespaces(str(error)) from error
    finally:
        for name in _NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class TwoNodes(OnRay):
    """Implements ``Arrangement``: a verifier on each node, of which the one on node B is behind the link."""

    place = "two nodes"

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__(model, "", folder / "cache")
        self._replicas = {"router": 1, "verifier": 2, "drafter": 1}
        kept = ("retrieval.", "verifier.stages", "router.replicas")
        self._flags = [flag for flag in self._flags if not flag.startswith(kept)]
        self._flags += ["verifier.max_replicas_per_node=1", "drafter.host=0.0.0.0"]
        self._ray |= {**ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._log = folder / "nodes.log"
        self._nodes: list[subprocess.Popen[bytes]] = []

    @override
    async def start(self) -> None:
        if not self._nodes:
            self._nodes = [self._node(1), self._node(2)]
            self._ray |= {"RAY_ADDRESS": _HEAD}
        await super().start()

    def _node(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--num-cpus=2",
            f"--node-ip-address={_SUBNET}.{number}",
        ]
        command += ["--head", "--port=6379", "--include-dashboard=false"] if number == 1 else [f"--address={_HEAD}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | self._ray
        environment.pop("RAY_ADDRESS", None)
        with self._log.open("ab") as log:
            inside = ["ip", "netns", "exec", _NAMES[number - 1], *command]
            process = subprocess.Popen(inside, env=environment, stdout=log, stderr=log, start_new_session=True)
        if number == 1:
            deadline = time.monotonic() + _NODE_S
            while b"Ray runtime started" not in self._log.read_bytes():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(self._log.read_text())
                time.sleep(0.2)
        return process

    @override
    async def stop(self) -> None:
        await super().stop()
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            try:
                await asyncio.to_thread(node.wait, 20)
            except subprocess.TimeoutExpired:
                node.kill()

    @override
    async def fail(self, plan: Plan, streams_ended: asyncio.Event) -> None:
        if plan.cell.fault == "slow":
            _slow_down()
        else:
            _do("ip", "link", "set", "link0", "down")
        if plan.cell.fault == "gone":
            await streams_ended.wait()
        else:
            await asyncio.sleep(plan.lasts_s)
        if plan.cell.fault == "slow":
            _do("tc", "qdisc", "del", "dev", "link0", "root")
        else:
            _do("ip", "link", "set", "link0", "up")
        # A node that Ray has given up ends, and is started again by whoever supervises it.
        whole = asyncio.create_task(self._whole())
        while not whole.done():
            if self._nodes[1].poll() is not None:
                self._nodes[1] = self._node(2)
            await asyncio.wait((whole,), timeout=1.0)
        await whole


def _slow_down() -> None:
    for way in _SLOW:
        try:
            _do("tc", "qdisc", "add", "dev", "link0", "root", *way.split())
            return
        except NoNamespaces as error:
            reason = error
    raise reason


@asynccontextmanager
async def arranged_on_two_nodes(model: Path) -> AsyncIterator[TwoNodes]:
    """A running arrangement; to be called within ``two_namespaces``."""
    with tempfile.TemporaryDirectory() as folder:
        arrangement = TwoNodes(model, Path(folder))
        try:
            await arrangement.start()
            yield arrangement
        finally:
            await arrangement.stop()
