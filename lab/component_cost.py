"""What the components beside the verifiers cost: ``python -m lab.component_cost --model FOLDER [--index FOLDER]``.

Starts the service on a local Ray, sends it requests over gRPC, and reads what each component's process used: seconds of a
core, not of the clock, so that what else runs on the machine counts little. Two phases, with short and with long answers,
tell a request from a piece of an answer. Then, in this process: look-ups of an index, Redis, the choice of a verifier.
Prints one JSON object in seconds of a core, which ``benchmarks.fleet.plan`` reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench.environment import describe
from benchmarks.bench.prompts import BUILTIN, read_prompts
from benchmarks.fleet.hash_ring import HashRing
from cluster.verifiers.choice import choices, place_of, session_of
from lab.served_model import served
from outrider import AsyncClient, Retry, Unavailable
from services.retrieval.config import RetrievalConfig
from services.retrieval.service import RetrievalService
from speculation.messages import RetrievalQuery

# Ray's titles of the processes.
_TITLES = {
    "router": "ServeReplica:outrider:router",
    "drafter": "ServeReplica:outrider:drafter",
    "controller": "ServeController",
    "gcs": "gcs_server",
}
_AT_ONCE = 16


@dataclass(slots=True)
class _Asked:
    """What a phase asked for: requests, pieces of answers that came, passes of the verifier, and tokens."""

    requests: int = 0
    pieces: int = 0
    passes: int = 0
    tokens: int = 0


def _settings(drafters: int) -> tuple[str, ...]:
    return (
        "server.http_port=null", "server.ops_port=0", "server.max_concurrent_requests=4096",
        "verifier.max_num_seqs=16", "verifier.num_cpus=0.2", "router.num_cpus=0.2", "drafter.num_cpus=0.01",
        f"drafter.replicas={drafters}",
    )  # fmt: skip


def _used(service: psutil.Process) -> dict[str, float]:
    """Seconds of a core that the components' processes have used so far; drafters together."""
    found = dict.fromkeys(_TITLES, 0.0)
    for child in service.children(recursive=True):
        try:
            title = " ".join(child.cmdline())
            for name, words in _TITLES.items():
                if words in title:
                    times = child.cpu_times()
                    found[name] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


async def _phase(client: AsyncClient, prompts: list[str], requests: int, tokens: int) -> _Asked:
    asked, waiting = _Asked(), list(range(requests))

    async def caller() -> None:
        while waiting:
            number = waiting.pop()
            stream = client.stream(prompts[number % len(prompts)], max_tokens=tokens, ignore_eos=True, seed=number)
            async with stream:
                async for _ in stream:
                    asked.pieces += 1
            assert stream.result is not None
            speculative = stream.result.speculative_decoding
            asked.requests += 1
            asked.tokens += stream.result.usage.completion_tokens
            asked.passes += round(stream.result.usage.completion_tokens / max(1.0, speculative.mean_acceptance_length))

    await asyncio.gather(*(caller() for _ in range(_AT_ONCE)))
    return asked


async def _answered(client: AsyncClient, service: psutil.Process) -> None:
    while True:
        try:
            await client.generate("The city", max_tokens=4)
            return
        except Unavailable:
            if not service.is_running() or service.status() == psutil.STATUS_ZOMBIE:
                raise SystemExit("the service has not started; what it said stands above") from None
            await asyncio.sleep(0.5)


async def _idle(service: psutil.Process, seconds: float) -> dict[str, float]:
    """Cores that Ray's controllers use while nobody asks for anything."""
    await asyncio.sleep(3)
    before, began = _used(service), time.monotonic()
    await asyncio.sleep(seconds)
    after, passed = _used(service), time.monotonic() - began
    return {name: (after[name] - before[name]) / passed for name in ("controller", "gcs")}


async def _through_service(
    model: str, short: int, long: int, tokens: int, idle_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """What requests cost, and what Ray's controllers use for one replica of each component."""
    prompts = [prompt.turns[0][:2000] for prompt in read_prompts(BUILTIN)]
    with served(model, _settings(1)) as (address, service):
        async with AsyncClient(address, retry=Retry(attempts=1), timeout_s=300) as client:
            await _answered(client, service)
            await _phase(client, prompts, _AT_ONCE, 8)
            before = _used(service)
            few = await _phase(client, prompts, short, 1)
            between = _used(service)
            many = await _phase(client, prompts, long, tokens)
            after = _used(service)
        idle = await _idle(service, idle_s)
    first = {name: between[name] - before[name] for name in before}
    second = {name: after[name] - between[name] for name in before}
    # Two equations: requests * a + pieces * b = seconds.
    determinant = few.requests * many.pieces - many.requests * few.pieces
    request_s = (first["router"] * many.pieces - second["router"] * few.pieces) / determinant
    piece_s = (few.requests * second["router"] - many.requests * first["router"]) / determinant
    found = {
        "router_request_s": request_s,
        "router_piece_s": piece_s,
        "drafter_draft_s": second["drafter"] / many.passes,
        "tokens_per_piece": many.tokens / many.pieces,
        "requests": few.requests + many.requests,
        "pieces": few.pieces + many.pieces,
        "drafts": many.passes,
    }
    return found, idle


async def _with_drafters(model: str, drafters: int, idle_s: float) -> dict[str, float]:
    """What Ray's controllers use for so many drafters, a router and a verifier."""
    with served(model, _settings(drafters)) as (address, service):
        async with AsyncClient(address, retry=Retry(attempts=1), timeout_s=300) as client:
            await _answered(client, service)
        return await _idle(service, idle_s)


def _core_s(do: Callable[[int], object], count: int) -> float:
    """Seconds of a core that a call takes."""
    began = time.process_time()
    for number in range(count):
        do(number)
    return (time.process_time() - began) / count


def _choice(replicas: int) -> dict[str, float]:
    """The choice of a verifier, and a new ring, with so many replicas."""
    source = random.Random(1)
    names = [f"{source.getrandbits(64):x}" for _ in range(replicas)]
    loads = {name: source.randrange(20, 30) for name in names}
    ring = HashRing(names)

    def choose(number: int) -> None:
        session = session_of("tenant", tuple(range(number, number + 128)))
        choices(ring.order(place_of(session)), session, loads.__getitem__)

    return {"choice_s": _core_s(choose, 400), "ring_s": _core_s(lambda _: HashRing(names), 5)}


async def _look_ups(folder: Path) -> float:
    service = RetrievalService(RetrievalConfig(index=folder))
    await service.start()
    source = random.Random(2)
    queries = [
        RetrievalQuery(
            suffix=tuple(source.randrange(400) for _ in range(8)), max_continuations=16, max_length=10, session_id="cost"
        )
        for _ in range(2000)
    ]
    return _core_s(lambda number: service.look_up([queries[number]]), len(queries))


def _redis() -> dict[str, float]:
    """The server's side of what a retrieval service asks while it follows the live version."""
    from retrieval_index.embedded import embedded_redis
    from retrieval_index.store import IndexStore

    with embedded_redis() as url:
        store = IndexStore(url, "cost")
        children = psutil.Process().children(recursive=True)

        def used() -> float:
            return sum(child.cpu_times().user + child.cpu_times().system for child in children)

        count, before = 5000, used()
        for _ in range(count):
            store.last_change()
        found = (used() - before) / count
        store.close()
    return {"redis_command_s": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as for outrider serve; a small one")
    parser.add_argument("--index", type=Path, help="folder of an index for it")
    parser.add_argument("--short", type=int, default=200, help="requests with one token")
    parser.add_argument("--long", type=int, default=32, help="requests with --tokens tokens")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafters", type=int, default=8, help="replicas for the second look at Ray's controllers")
    parser.add_argument("--idle", type=float, default=12.0, help="seconds of each look at Ray's controllers")
    arguments = parser.parse_args()
    found: dict[str, object] = {"machine": describe(0)}
    requests, one = asyncio.run(
        _through_service(arguments.model, arguments.short, arguments.long, arguments.tokens, arguments.idle)
    )
    several = asyncio.run(_with_drafters(arguments.model, arguments.drafters, arguments.idle))
    found |= requests
    for name in one:
        each = (several[name] - one[name]) / (arguments.drafters - 1)
        found |= {f"{name}_replica_s": each, f"{name}_idle_s": one[name] - 3 * each}
    found["choice"] = {str(replicas): _choice(replicas) for replicas in (8, 64, 512)}
    found |= _redis()
    if arguments.index is not None:
        found["look_up_s"] = asyncio.run(_look_ups(arguments.index))
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
