"""A server under ten times the load that it can serve: ``python -m lab.overload --model FOLDER``.

Starts a server in another process, measures what it can serve with every slot taken and nobody waiting, and then sends
many times as much. Prints one JSON object: how long answered requests took (seconds, from call to last token), how many were
refused, and the memory of the server (MiB) at the start and the end of the overload.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field

import psutil

from lab.served_model import served
from outrider import AsyncClient, ResourceExhausted, Retry, Unavailable

_ONCE = Retry(attempts=1)


@dataclass
class Phase:
    """What was seen in one part of the run.

    Attributes:
        took: seconds of each answered request.
        refused: requests that the server refused for lack of room.
        most_memory: of the server, in MiB.
    """

    took: list[float] = field(default_factory=list)
    refused: int = 0
    most_memory: float = 0.0

    def shown(self) -> dict[str, float]:
        """The phase in numbers."""
        times = sorted(self.took)
        return {
            "answered": len(times),
            "refused": self.refused,
            "p50_s": _percentile(times, 0.5),
            "p99_s": _percentile(times, 0.99),
            "most_memory_mib": self.most_memory,
        }


def _percentile(times: list[float], share: float) -> float:
    return round(times[int(share * (len(times) - 1))], 4) if times else float("nan")


async def _one(client: AsyncClient, phase: Phase, tokens: int) -> None:
    began = time.perf_counter()
    try:
        await client.generate("The city", max_tokens=tokens, ignore_eos=True, seed=len(phase.took))
    except ResourceExhausted:
        phase.refused += 1
    else:
        phase.took.append(time.perf_counter() - began)


async def _closed(client: AsyncClient, slots: int, tokens: int, seconds: float) -> Phase:
    """As many callers as there are slots, each with one request after the other."""
    phase, end = Phase(), time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < end:
            await _one(client, phase, tokens)

    await asyncio.gather(*(caller() for _ in range(slots)))
    return phase


async def _open(client: AsyncClient, rate: float, tokens: int, seconds: float, server: psutil.Process) -> Phase:
    """Requests that arrive at random times, whether or not earlier ones are answered."""
    phase, end, source = Phase(), time.perf_counter() + seconds, random.Random(1)
    under_way: set[asyncio.Task[None]] = set()
    while time.perf_counter() < end:
        task = asyncio.create_task(_one(client, phase, tokens))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        phase.most_memory = max(phase.most_memory, round(server.memory_info().rss / 2**20, 1))
        await asyncio.sleep(source.expovariate(rate))
    await asyncio.gather(*under_way)
    return phase


async def _measure(address: str, server: psutil.Process, arguments: argparse.Namespace) -> dict[str, object]:
    slots, tokens, seconds = arguments.slots, arguments.tokens, arguments.seconds
    async with AsyncClient(address, retry=_ONCE, timeout_s=300) as client:
        while True:
            try:
                await client.generate("The city", max_tokens=tokens, ignore_eos=True)
                break
            except Unavailable:
                await asyncio.sleep(0.5)
        full = await _closed(client, slots, tokens, seconds)
        capacity = len(full.took) / seconds
        before = round(server.memory_info().rss / 2**20, 1)
        over = await _open(client, arguments.times * capacity, tokens, seconds, server)
        calm = await _closed(client, slots, tokens, seconds)
    return {
        "capacity_per_s": round(capacity, 2),
        "full": full.shown(),
        "overload": over.shown(),
        "afterwards": calm.shown(),
        # Against before and after: a machine that is shared drifts.
        "p99_ratios": [round(over.shown()["p99_s"] / other.shown()["p99_s"], 3) for other in (full, calm)],
        "answered_per_s": round(len(over.took) / seconds, 2),
        "memory_before_mib": before,
    }


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="as for outrider serve")
    parser.add_argument("--slots", type=int, default=8, help="verifier.max_num_seqs")
    parser.add_argument("--waiting", type=int, default=2, help="verifier.max_waiting")
    parser.add_argument("--wait", type=float, help="verifier.max_wait_s; not set: waiting is bounded by number alone")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--times", type=float, default=10.0, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each part")
    arguments = parser.parse_args()
    flags = (
        f"verifier.max_num_seqs={arguments.slots}", f"verifier.max_waiting={arguments.waiting}",
        "server.max_concurrent_requests=4096",
        *(() if arguments.wait is None else (f"verifier.max_wait_s={arguments.wait}",)),
    )  # fmt: skip
    with served(arguments.model, flags, in_process=True) as (address, server):
        found = asyncio.run(_measure(address, server, arguments))
    json.dump({**vars(arguments), **found}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
