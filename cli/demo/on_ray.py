"""``outrider serve`` with two verifiers, in a process of its own, and the death of the one that answers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import psutil

from speculation.errors import OutriderError

_FLAGS = ("server.port=0", "server.http_port=0", "verifier.replicas=2", "verifier.num_cpus=0.5")
_READY = re.compile(r"at ([\d.]+:\d+)")
_HTTP = re.compile(r"OpenAI's API: (\S+)/v1")
# How the command line of a verifier's process begins.
_VERIFIER = "ray::ServeReplica:outrider:verifier"
# Seconds in which the verifier that answers is seen to work.
_WATCHED_S = 0.2


class ServedAt(NamedTuple):
    """Where gRPC is, and the URL of the page."""

    grpc: str
    page: str


class RayService:
    """The service, from the moment that it begins to start. Leaving the block stops it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "cli", "serve"]
        for flag in _FLAGS:
            command += ["--set", flag]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._served_at: ServedAt | None = None
        self._said: list[str] = []
        # A pipe that nobody empties would stop the service.
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()

    def __enter__(self) -> RayService:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def addresses(self) -> ServedAt:
        """Wait until it serves.

        Raises:
            OutriderError: it has ended; says why.
        """
        if self._served_at is not None:
            return self._served_at
        assert self._process.stdout is not None
        grpc = _READY.search(self._process.stdout.readline())
        http = _HTTP.search(self._process.stdout.readline())
        if grpc is None or http is None:
            self._process.wait()
            self._reading.join()
            raise OutriderError("the service on Ray has not started: " + "".join(self._said[-5:]).strip())
        self._served_at = ServedAt(grpc=grpc[1], page=f"{http[1]}/")
        return self._served_at

    def kill_the_one_that_answers(self) -> int:
        """Kill -9 the verifier that works most at this moment; its process id."""
        verifiers = [each for each in psutil.Process(self._process.pid).children(recursive=True) if _is_verifier(each)]
        before = {each.pid: sum(each.cpu_times()[:2]) for each in verifiers}
        time.sleep(_WATCHED_S)
        busiest = max(verifiers, key=lambda each: sum(each.cpu_times()[:2]) - before[each.pid])
        busiest.kill()
        return int(busiest.pid)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)


def _is_verifier(process: psutil.Process) -> bool:
    try:
        return any(part.startswith(_VERIFIER) for part in process.cmdline())
    except psutil.Error:
        return False
