"""Where the time of one decoding step goes, in one process and over gRPC + Ray.

    python -m lab.step_breakdown [--tokens 96] [--repeats 3] [--together 1 16] [--only in_process]

Every number is milliseconds per step, the mean over all steps of a strategy, greedy or sampled (temperature 0.8, top-p 0.9,
all penalties), with one request at a time or several. `forward` is the target's pass without its choices; everything else is
our overhead. `to the client` is a step's time as the client sees it minus what the loop accounts for: event loop, links,
router, detokenising, and on Ray the Serve call and the public server. Cases take turns in every repeat; the tables show
medians over repeats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from rich.table import Table

import outrider
from cluster.models.target import resolve
from cluster.process.terminal import stdout
from cluster.settings.config import Settings, load

STRATEGIES = ("autoregressive", "prompt_lookup")
SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "sampled": {
        "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2
    },
}  # fmt: skip
PROMPTS = (
    "Repeat this list three times: apples, pears, plums, cherries, grapes.",
    "Write a Python class Point with fields x and y, and methods __add__, __sub__ and __eq__.",
    "Explain in three sentences why the sky is blue.",
)
PARTS = ("draft_wait", "schedule", "begin", "forward", "choose", "keep", "thread hop", "deliver", "to the client")
Row = dict[str, float]
# Returns seconds by part, and the number of steps, since start.
Probe = Callable[[], tuple[Row, int]]


@dataclass(frozen=True)
class Case:
    """Requests of one kind, ``together`` at a time."""

    strategy: str
    sampling: str
    together: int

    @property
    def name(self) -> str:
        """Its name in the results."""
        return f"{self.strategy} {self.sampling} x{self.together}"


def cases(together: Sequence[int]) -> list[Case]:
    """All cases: every strategy, sampling and number of requests at a time."""
    return [Case(*kind) for kind in itertools.product(STRATEGIES, SAMPLINGS, together)]


def measure(client: outrider.Client, probe: Probe, case: Case, tokens: int) -> Row:
    """Milliseconds per step of one case over all prompts."""

    def ask(request: int) -> None:
        client.generate(
            messages=[{"role": "user", "content": PROMPTS[request % len(PROMPTS)]}],
            strategy=cast("outrider.Strategy", case.strategy),
            max_tokens=tokens,
            seed=request,
            ignore_eos=True,
            ignore_generation_config=True,
            **SAMPLINGS[case.sampling],  # type: ignore[arg-type]
        )

    before, steps_before = probe()
    start = time.perf_counter()
    with ThreadPoolExecutor(case.together) as clients:
        # All prompts, and at least one request for every client.
        for _ in clients.map(ask, range(max(len(PROMPTS), case.together))):
            pass
    seen = time.perf_counter() - start
    after, steps_after = probe()
    steps = steps_after - steps_before
    row = {part: 1e3 * (after.get(part, 0.0) - before.get(part, 0.0)) / steps for part in after}
    row["thread hop"] = row.pop("pass_and_verify") - row["begin"] - row["forward"] - row["choose"] - row["keep"]
    row["to the client"] = 1e3 * seen / steps - sum(row[part] for part in PARTS if part in row)
    return row


def run(client: outrider.Client, probe: Probe, arguments: argparse.Namespace) -> dict[str, Row]:
    """Medians over the repeats, by case."""
    every = cases(arguments.together)
    measure(client, probe, every[0], 8)
    rows: dict[str, list[Row]] = {case.name: [] for case in every}
    for _ in range(arguments.repeats):
        for case in every:
            rows[case.name].append(measure(client, probe, case, arguments.tokens))
    return {
        name: {part: statistics.median(row[part] for row in several) for part in PARTS} for name, several in rows.items()
    }


def in_process(settings: Settings, arguments: argparse.Namespace) -> dict[str, Row]:
    """Measure with all components in this process, through the public server."""
    import asyncio
    import threading

    from cluster import build
    from services.api.config import PublicServerConfig
    from services.api.grpc.server import serve_public

    model = resolve(settings.model, settings.cache_dir)
    result: dict[str, Row] = {}

    async def serve() -> None:
        async with build.in_process(settings, model) as pipeline:
            server = await serve_public(pipeline.router, PublicServerConfig(port=0))
            times = pipeline.verifier.loop.stats.times

            def client_side() -> None:
                with outrider.Client(server.address) as client:
                    result.update(run(client, lambda: (dict(times.seconds), times.steps), arguments))

            await asyncio.to_thread(client_side)
            await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    thread.join()
    return result


def on_ray(settings: Settings, arguments: argparse.Namespace) -> dict[str, Row]:
    """Measure on a local Ray cluster."""
    from cluster.ray.on_ray import running_on_ray

    model = resolve(settings.model, settings.cache_dir)
    with running_on_ray(settings, model) as addresses, outrider.Client(addresses.grpc) as client:
        from ray import serve

        handle = serve.get_deployment_handle("verifier", "outrider")

        def probe() -> tuple[Row, int]:
            times: dict[str, Any] = handle.loop_stats.remote().result(timeout_s=60)["times"]
            return times["seconds"], times["steps"]

        return run(client, probe, arguments)


TOPOLOGIES = {"in_process": in_process, "ray": on_ray}


def show(results: dict[str, dict[str, Row]], together: Sequence[int]) -> None:
    """Print a table for every topology and number of requests."""
    for topology, number in itertools.product(results, together):
        table = Table(title=f"milliseconds per step, medians: {topology}, {number} at a time", title_justify="left")
        table.add_column("part")
        rows = [results[topology][case.name] for case in cases([number])]
        for case in cases([number]):
            table.add_column(f"{case.strategy}\n{case.sampling}", justify="right", no_wrap=True)
        for part in PARTS:
            table.add_row(part, *(f"{row[part]:.2f}" for row in rows))
        table.add_section()
        table.add_row("all but forward", *(f"{sum(row.values()) - row['forward']:.2f}" for row in rows))
        stdout().print(table)


def main() -> None:
    """Run both topologies, each in a process of its own, and show them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="tokens per answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 16], help="requests at a time")
    parser.add_argument("--only", choices=TOPOLOGIES, help="one topology")
    parser.add_argument("--json", action="store_true", help="of one topology, and as JSON")
    arguments = parser.parse_args()
    if arguments.json:
        settings = load(flags=["server.port=0"])
        print(json.dumps(TOPOLOGIES[arguments.only](settings, arguments)))
        return
    results = {}
    for topology in [arguments.only] if arguments.only else TOPOLOGIES:
        command = [sys.executable, "-m", "lab.step_breakdown", "--only", topology, "--json"]
        options = ["--tokens", str(arguments.tokens), "--repeats", str(arguments.repeats)]
        options += ["--together", *map(str, arguments.together)]
        done = subprocess.run([*command, *options], check=True, text=True, stdout=subprocess.PIPE)
        results[topology] = json.loads(done.stdout.splitlines()[-1])
    show(results, arguments.together)


if __name__ == "__main__":
    main()
