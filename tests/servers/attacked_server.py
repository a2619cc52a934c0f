"""A server on a tiny model of a long context, in a process of its own, and what attacks on it cost it and others."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import psutil

import outrider
from tests.running.slowed_by_others import slowed_by_others
from tests.tiny_models.tiny import make_tiny_model

CONTEXT = 131_072
# Room for an attack's prompt and a victim beside it.
SETTINGS = (f"verifier.max_model_len={CONTEXT}", f"verifier.kv_cache_tokens={CONTEXT + 8192}")
_PATIENCE_S = 300.0
# How long others are watched on, at most, until something reaches them that was sent after an attack.
_AFTER_S = 1.0
# Servers of the service by how the paths of their methods begin.
_SERVERS = {
    "/outrider.v1.GenerationService/": "public",
    "/outrider.internal.v1.VerificationService/": "verifier",
    "/outrider.internal.v1.DraftingService/": "drafter",
    "/outrider.internal.v1.RetrievalService/": "retrieval",
}


class Hostile(Protocol):
    """What is sent: to which path of HTTP or gRPC, and its body at a size."""

    @property
    def door(self) -> str: ...

    @property
    def make(self) -> Callable[[int], bytes]: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What an attack cost: processor seconds of the server, and the longest that somebody else waited for /health.

    All waits are those of a machine that does nothing else: they are divided by how much others slowed the server.

    Attributes:
        end: an HTTP status, or that of gRPC.
    """

    cpu_s: float
    health_s: float
    end: str


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], addresses: dict[str, str]) -> None:
        self._process = psutil.Process(process.pid)
        self._http, self._grpc = addresses["http"], addresses["public"]
        self._addresses = addresses

    def cost(self, attack: Hostile, size: int) -> Cost:
        """What the attack costs at this size."""
        body = attack.make(size)
        with slowed_by_others(self._process) as slowed, self._asking() as waits:
            before = self._cpu_s()
            end = self._end(attack, body)
            cpu_s = self._cpu_s() - before
        return Cost(cpu_s, max(waits) / slowed(), end)

    def victims_gap_s(self, attack: Hostile | None, size: int = 0) -> float:
        """The longest time between two pieces of somebody else's stream while the attack goes on; None: none does."""
        body = b"" if attack is None else attack.make(size)
        gaps, over, told = list[float](), threading.Event(), threading.Event()

        def stream() -> None:
            with outrider.Client(self._grpc) as client:
                options: outrider.Options = {"max_tokens": 4096, "ignore_eos": True, "strategy": "autoregressive"}
                with client.stream(token_ids=[5, 6, 7], **options) as pieces:
                    last = 0.0
                    for _ in pieces:
                        now = time.perf_counter()
                        if last:
                            gaps.append(now - last)
                        told.set()
                        last = now
                        if over.is_set():
                            return

        victim = threading.Thread(target=stream)
        victim.start()
        told.wait(_PATIENCE_S)
        with slowed_by_others(self._process) as slowed:
            if attack is None:
                time.sleep(0.5)
            else:
                self._end(attack, body)
            told.clear()
            told.wait(_AFTER_S)
            over.set()
            victim.join()
        return max(gaps) / slowed()

    def _end(self, attack: Hostile, body: bytes) -> str:
        """How the attack ends: an HTTP status, or that of gRPC."""
        for beginning, name in _SERVERS.items():
            if attack.door.startswith(beginning):
                return self._grpc_end(self._addresses[name], attack.door, body)
        return self._http_end(attack.door, body)

    def idle_s(self, seconds: float = 1.0) -> float:
        """The longest wait for /health while nothing else is asked: what the machine's other work costs."""
        with slowed_by_others(self._process) as slowed, self._asking() as waits:
            time.sleep(seconds)
        return max(waits) / slowed()

    def _http_end(self, path: str, body: bytes) -> str:
        connection = http.client.HTTPConnection(self._http, timeout=_PATIENCE_S)
        connection.request("POST", path, body, {"content-type": "application/json", "host": "localhost"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return str(answer.status)

    def _grpc_end(self, address: str, method: str, body: bytes) -> str:
        with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            try:
                # One message and an end: what a stream of one is.
                for _ in channel.unary_stream(method)(body, timeout=_PATIENCE_S):
                    pass
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"

    def _cpu_s(self) -> float:
        """Of the server and of the processes that it has started."""
        total = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    @contextmanager
    def _asking(self) -> Iterator[list[float]]:
        """Ask for /health again and again; how long each answer took."""
        host, port = self._http.rsplit(":", 1)
        waits, over, answered = list[float](), threading.Event(), threading.Event()

        def ask() -> None:
            with socket.create_connection((host, int(port))) as connection:
                while not over.is_set():
                    began = time.perf_counter()
                    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    connection.recv(4096)
                    waits.append(time.perf_counter() - began)
                    answered.set()
                    time.sleep(0.003)

        asking = threading.Thread(target=ask)
        asking.start()
        answered.wait(_AFTER_S)
        try:
            yield waits
        finally:
            # The second one was asked after the end.
            for _ in range(2):
                answered.clear()
                answered.wait(_AFTER_S)
            over.set()
            asking.join()


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """A server on a tiny model of a long context."""
    make_tiny_model(folder, max_position_embeddings=CONTEXT)

    command = [sys.executable, "-m", "tests.servers.malformed_service", str(folder), *SETTINGS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Served(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
