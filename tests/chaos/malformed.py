"""Malformed messages, gRPC and HTTP, against all servers of a live service::

    python -m tests.chaos.malformed --count 1000000 --seed 1 --minutes 20
    python -m tests.chaos.malformed --seed 1 --only 4711      # one of them again

Every one must be answered with a status that says that it was bad, good requests between them must be answered rightly, the
server's log must hold no traceback, and its memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

import outrider
from tests.servers import malformed_grpc, malformed_http

AT_ONCE = 16
_GOOD_EVERY = 100
_ANSWER_S = 60.0
# Most growth of the server's memory after the first fifth of the messages.
MOST_GROWTH = 64 << 20
_GOOD = {"max_tokens": 8, "ignore_eos": True}


@dataclass(slots=True)
class Found:
    """What came of them: how many ended how, and the numbers of those that were answered wrongly, with what was wrong."""

    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    wrong: list[tuple[int, str, str]] = field(default_factory=list)
    good: int = 0


class Attack:
    """Sends messages number 0, 1, 2, ... of a seed, of which half are gRPC and half HTTP."""

    def __init__(self, addresses: Mapping[str, str], seed: int) -> None:
        self._addresses, self._seed = addresses, seed
        self.found = Found()

    async def send(self, numbers: Iterable[int], at_once: int = AT_ONCE) -> None:
        """Send those of these numbers, so many at once, and good requests between them."""
        waiting = iter(numbers)
        async with AsyncExitStack() as stack:
            self._channels = {
                name: await stack.enter_async_context(grpc.aio.insecure_channel(address))
                for name, address in self._addresses.items()
                if name != "http"
            }
            self._client = await stack.enter_async_context(outrider.AsyncClient(self._addresses["public"]))
            self._right = (await self._client.generate("fox", **_GOOD)).token_ids
            await asyncio.gather(*(self._work(waiting) for _ in range(at_once)))
            await self._ask_well(-1)

    async def _work(self, waiting: Iterable[int]) -> None:
        host, _, port = self._addresses["http"].rpartition(":")
        raw = malformed_http.RawClient(host, int(port))
        for number in waiting:
            source = random.Random(f"{self._seed} {number}")
            if number % _GOOD_EVERY == 0:
                await self._ask_well(number)
            if source.random() < 0.5:
                await self._send_grpc(number, malformed_grpc.call(source))
            else:
                await self._send_http(number, malformed_http.exchange(source, self._addresses["http"]), raw)
        await raw.close()

    async def _send_grpc(self, number: int, made: malformed_grpc.Call) -> None:
        code, words = await malformed_grpc.status_of(self._channels[made.method.server], made, _ANSWER_S)
        self.found.ends["gRPC", made.kind, code.name] += 1
        if code not in made.allowed:
            self.found.wrong.append((number, f"gRPC {made.method.path}, {made.kind}", f"{code.name}: {words}"))

    async def _send_http(self, number: int, made: malformed_http.Exchange, raw: malformed_http.RawClient) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await raw.converse(made)
            wrong = malformed_http.wrong_with(made, answers)
        except (TimeoutError, ValueError) as error:
            answers, wrong = [], f"{type(error).__name__}: {error}"
            await raw.close()
        self.found.ends["HTTP", made.kind, " ".join(str(status) for status, _ in answers) or "closed"] += 1
        if wrong:
            self.found.wrong.append((number, f"HTTP, {made.kind}: {made.data[:300]!r}", wrong))

    async def _ask_well(self, number: int) -> None:
        answer = await self._client.generate("fox", **_GOOD)
        self.found.good += 1
        if answer.token_ids != self._right:
            self.found.wrong.append((number, "a good request", f"{answer.token_ids} instead of {self._right}"))


class _Server:
    """The service in a process of its own."""

    def __init__(self, model: Path, log: Path) -> None:
        self.log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.servers.malformed_service", str(model)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self.addresses: dict[str, str] = json.loads(self._process.stdout.readline())

    @property
    def memory(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def stop(self) -> int:
        """End it; its exit code says whether it has forgotten everything."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(60)


async def _run(server: _Server, given: argparse.Namespace) -> bool:
    attack = Attack(server.addresses, given.seed)
    ends_at = time.monotonic() + 60 * given.minutes
    sent = itertools.count(1)
    memory: list[tuple[int, int]] = []

    def numbers() -> Iterable[int]:
        for number in range(given.count):
            if time.monotonic() >= ends_at:
                return
            if number % max(1, given.count // 200) == 0 or number % 2000 == 0:
                memory.append((number, server.memory))
            next(sent)
            yield number

    began = time.monotonic()
    await attack.send([given.only] if given.only is not None else numbers())
    took, count = time.monotonic() - began, next(sent) - 1
    found = attack.found
    code = server.stop()
    log = server.log.read_text(errors="replace")
    for (protocol, kind, end), times in sorted(found.ends.items()):
        print(f"{protocol:5} {kind:20} {end:25} {times:8}")
    for number, what, wrong in found.wrong[:40]:
        print(f"WRONG {number}: {what}: {wrong}")
    steady = [size for number, size in memory if number >= count / 5] or [0]
    growth = steady[-1] - steady[0]
    print(f"{count} messages in {took:.0f} s ({count / max(took, 1e-9):.0f}/s), {found.good} good requests between them")
    print(
        f"{len(found.wrong)} wrong; memory {steady[0] >> 20} -> {steady[-1] >> 20} MiB after the first fifth (most {max(steady) >> 20})"
    )
    print(f"log: {len(log)} bytes, {log.count('Traceback')} tracebacks; the server ended with {code}")
    for traceback in list(re.finditer("Traceback", log))[:5]:
        print(f"... {log[max(0, traceback.start() - 500) : traceback.start() + 4000]} ...")
    if found.wrong:
        print(log[-3000:])
    return not found.wrong and "Traceback" not in log and code == 0 and growth < MOST_GROWTH


def main() -> None:
    """Do what the command line says; exit code 1 if anything was wrong."""
    from tests.tiny_models.tiny import make_tiny_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--only", type=int, help="send the message of this number alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = _Server(make_tiny_model(Path(folder)), Path(folder) / "log")
        raise SystemExit(0 if asyncio.run(_run(server, given)) else 1)


if __name__ == "__main__":
    main()
