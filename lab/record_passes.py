"""Records what passes held and how long they took, for the test of the model of costs:
tests/unit/verifier/test_recorded_passes.py.

    python -m lab.record_passes OUT [--tokens 48] [--together 1 4 8 16]

One process, the default model, built-in prompts, plain decoding and ``blend`` by turns. Run it with nothing else running,
since what else the machine does is in the times. Passes that compute prompts are left out, since their cost is learnt apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import outrider
from benchmarks.bench.environment import describe
from benchmarks.bench.prompts import BUILTIN, read_prompts
from cluster import build
from cluster.models.target import resolve
from cluster.settings.config import load
from services.api.config import PublicServerConfig
from services.api.grpc.server import serve_public
from services.verifier.engine import loop as decoding
from services.verifier.engine.deciding import lessons
from services.verifier.engine.passes import Part, PassSize
from speculation.budget import Budget

STRATEGIES: tuple[outrider.Strategy, ...] = ("autoregressive", "blend")


class Recorder:
    """Notes each pass where the loop teaches the budget.

    Attributes:
        passes: by the names in ``COLUMNS``; ``busy``: for how many requests each kind of drafts was made meanwhile.
    """

    COLUMNS = ("rows", "requests", "keys", "row_keys", "took_us", "seconds_us", "busy")

    def __init__(self, running: decoding.DecodingLoop) -> None:
        self.passes: list[list[Any]] = []
        self.origins: tuple[str, ...] = ()
        self._learn, self._teach = running._drafting.costs.learn, lessons.teach
        self._seen: tuple[float, dict[str, Sequence[bool]]] | None = None
        running._drafting.costs.learn = self.learn  # type: ignore[method-assign]
        lessons.teach = self.teach  # type: ignore[assignment]

    def learn(self, size: PassSize, busy: Mapping[str, Sequence[bool]], seconds: float, expected_s: float) -> None:
        """Stands for ``DraftCosts.learn``."""
        self._seen = (seconds, {name: list(each) for name, each in busy.items()})
        self._learn(size, busy, seconds, expected_s)

    def teach(self, budget: Budget, parts: Sequence[Part], size: PassSize, took: float, *, slowed_s: float) -> None:
        """Stands for ``teach``."""
        if self._seen is not None and not size.prompts:
            seconds, busy = self._seen
            self.origins = tuple(busy)
            counts = [[each.count(False), each.count(True)] for each in busy.values()]
            held = size.load
            times = (round(1e6 * took), round(1e6 * seconds))
            self.passes.append([held.rows, held.requests, held.keys, held.row_keys, *times, counts])
        self._seen = None
        self._teach(budget, parts, size, took, slowed_s=slowed_s)


def ask_all(address: str, tokens: int, together: Sequence[int]) -> None:
    """Answer the built-in prompts at each load, by turns of the strategies."""
    prompts = read_prompts(BUILTIN, 2)
    with outrider.Client(address) as client:
        for number in together:
            for strategy in STRATEGIES:

                def ask(index: int, strategy: outrider.Strategy = strategy) -> None:
                    said = [outrider.Message(role="user", content=prompts[index % len(prompts)].turns[0])]
                    client.generate(messages=said, strategy=strategy, max_tokens=tokens, seed=index, temperature=0.0)

                with ThreadPoolExecutor(number) as clients:
                    list(clients.map(ask, range(max(number, 6))))


def main() -> None:
    """Parse, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 4, 8, 16])
    arguments = parser.parse_args()
    settings = load(None, ["verifier.keep_learnt=false"])

    async def serve() -> None:
        async with build.in_process(settings, resolve(settings.model, settings.cache_dir)) as pipeline:
            running = pipeline.verifier.loop
            table = running._budget._costs.as_object()  # type: ignore[attr-defined]
            recorder = Recorder(running)
            server = await serve_public(pipeline.router, PublicServerConfig(port=0))
            await asyncio.to_thread(ask_all, server.address, arguments.tokens, arguments.together)
            await server.stop(0)
        machine = {name: describe(0)[name] for name in ("processor", "cores", "commit")}
        columns = Recorder.COLUMNS
        result = {
            "machine": machine,
            "table": table,
            "origins": recorder.origins,
            "columns": columns,
            "passes": recorder.passes,
        }
        arguments.out.write_text(json.dumps(result, separators=(",", ":")).replace("],[", "],\n[") + "\n")
        print(len(recorder.passes), "passes")

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
