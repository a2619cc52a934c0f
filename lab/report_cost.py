"""What it costs to tell with an answer who guessed its tokens: a client's seconds, with ``report`` and without.

    python -m lab.report_cost [--minutes 4] [--strategy blend] [--tokens 64] [--prompts builtin] [--per-task 1]

One service in this process, asked over gRPC by one client. Each prompt is answered four times by turns, greedily: without a
report, without one again, with ``sources`` and with ``trees``. Answers are compared in pairs, by prompt and turn; `again`
shows what is noise. Ends with code 1 if two answers to a prompt differ.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.bench.prompts import BUILTIN, read_prompts
from cluster.process.logs import quiet_libraries
from lab.left_out_cost import CostRatio

if TYPE_CHECKING:
    import outrider

NONE, AGAIN, SOURCES, TREES = "none", "again", "sources", "trees"
ASKED = (NONE, AGAIN, SOURCES, TREES)
# Seconds and tokens of the answer to a prompt that is asked with a report.
Ask = Callable[[str, str], tuple[float, tuple[int, ...]]]


def measure(ask: Ask, prompts: Sequence[str], minutes: float) -> dict[str, list[float]]:
    """Seconds of answers by what was asked for, in pairs; at least one turn over all prompts, and others until time is up.

    Raises:
        ValueError: two answers to a prompt differ; names it.
    """
    for kind in ASKED:
        ask(prompts[0], kind)
    seconds: dict[str, list[float]] = {kind: [] for kind in ASKED}
    began, turn = time.perf_counter(), 0
    while turn == 0 or time.perf_counter() - began < 60 * minutes:
        for prompt in prompts:
            first = turn % len(ASKED)
            answers = {kind: ask(prompt, kind) for kind in (*ASKED[first:], *ASKED[:first])}
            if len({tokens for _, tokens in answers.values()}) > 1:
                raise ValueError(f"the answers differ: {prompt[:60]}")
            for kind, (taken, _) in answers.items():
                seconds[kind].append(taken)
        turn += 1
    return seconds


def over_grpc(client: outrider.Client, strategy: str, tokens: int) -> Ask:
    """Asks a service."""

    def ask(prompt: str, kind: str) -> tuple[float, tuple[int, ...]]:
        began = time.perf_counter()
        said = client.generate(
            messages=[{"role": "user", "content": prompt}],
            strategy=strategy,  # type: ignore[arg-type]
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            report=NONE if kind == AGAIN else kind,  # type: ignore[arg-type]
            # What an earlier answer has left helps none.
            cache_salt=secrets.token_hex(8),
        )
        return time.perf_counter() - began, said.token_ids

    return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--strategy", default="blend")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", default=BUILTIN)
    parser.add_argument("--per-task", type=int, default=1)
    arguments = parser.parse_args()
    prompts = [prompt.turns[0] for prompt in read_prompts(arguments.prompts, arguments.per_task)]
    quiet_libraries()
    import outrider
    from cluster.service import serving
    from cluster.settings.config import load

    settings = load(flags=["server.port=0", "server.http_port=null", "server.ops_port=null"])
    with serving(settings, in_process=True, verbose=False) as addresses, outrider.Client(addresses.grpc) as client:
        try:
            seconds = measure(over_grpc(client, arguments.strategy, arguments.tokens), prompts, arguments.minutes)
        except ValueError as error:
            sys.exit(str(error))
    print(f"Seconds of an answer over those without a report: {arguments.strategy}, {arguments.tokens} tokens, all equal.")
    for kind in ASKED[1:]:
        print(f"{kind:8} {CostRatio.of(list(zip(seconds[kind], seconds[NONE], strict=True)))}")


if __name__ == "__main__":
    main()
