"""``make demo``: the whole pipeline on a local Ray, three prompts, answers streamed, every token compared.

A small index of Python's standard library is built on the spot, published in an embedded Redis, and served by the retrieval
service.
"""

from __future__ import annotations

import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

import outrider
from cluster import index_cli
from cluster.config import load
from cluster.service import running
from retrieval_index.embedded import embedded_redis
from retrieval_index.store import IndexStore

PROMPTS = (
    "Fix the spelling and repeat the whole text: Teh quick brown fox jumps over teh lazy dog. Teh dog sleeps. Teh fox runs.",
    "Write a Python class Point with fields x and y, and methods __add__, __sub__ and __eq__.",
    "Explain in three sentences why the sky is blue.",
)
PLAIN = "autoregressive"
STRATEGIES = (PLAIN, "prompt_lookup", "rest", "blend")
# Of the standard library: small, and what programs look like.
CORPUS = ("json", "dataclasses.py", "fractions.py", "statistics.py", "types.py", "abc.py", "enum.py")
MAX_TOKENS = 64
INDEX = "demo"

console = Console()


def main() -> None:
    """Run the demo."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, embedded_redis() as redis:
        _publish_index(Path(folder) / "index", redis)
        _serve_and_ask(redis, start)
    console.print(f"Done in {time.perf_counter() - start:.0f} s; nothing is left running.")


def _publish_index(folder: Path, redis: str) -> None:
    """A small index of the standard library, live in Redis."""
    library = Path(sysconfig.get_paths()["stdlib"])
    index_cli.build(corpus=[library / name for name in CORPUS], out_folder=folder, keep=0.8, score_tokens=64)
    IndexStore(redis, INDEX).publish(folder)


def _serve_and_ask(redis: str, start: float) -> None:
    settings = load(flags=["server.port=0", f"retrieval.redis_url={redis}", f"retrieval.name={INDEX}"])
    with running(settings, in_process=False, verbose=False) as address, outrider.Client(address) as client:
        took = time.perf_counter() - start
        console.print(f"Router, drafter, retrieval and verifier are up at {address} after {took:.0f} s.\n")
        results = {strategy: _ask_all(client, strategy) for strategy in STRATEGIES}
        console.print(_table(results))


def _ask_all(client: outrider.Client, strategy: str) -> list[outrider.Generation]:
    """All prompts, streamed to the terminal."""
    console.rule(strategy)
    return [_ask(client, strategy, prompt) for prompt in PROMPTS]


def _ask(client: outrider.Client, strategy: str, prompt: str) -> outrider.Generation:
    console.print(f"[bold]> {prompt}[/bold]")
    messages = [{"role": "user", "content": prompt}]
    with client.stream(messages=messages, strategy=strategy, max_tokens=MAX_TOKENS, temperature=0) as stream:
        for chunk in stream:
            console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")
    if stream.result is None:
        raise outrider.InternalError("the server ended the stream without a result")
    return stream.result


def _table(results: Mapping[str, list[outrider.Generation]]) -> Table:
    table = Table(title=f"{len(PROMPTS)} prompts, greedy, up to {MAX_TOKENS} tokens each", title_justify="left")
    for column in ("strategy", "tokens per pass", "tokens per second", "same tokens as plain decoding"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    plain = [answer.token_ids for answer in results[PLAIN]]
    for strategy, answers in results.items():
        tokens = sum(answer.usage.completion_tokens for answer in answers)
        passes = sum(answer.speculative_decoding.num_spec_steps for answer in answers)
        speed = tokens / sum(answer.timing.total_s for answer in answers)
        same = "yes" if [answer.token_ids for answer in answers] == plain else "[red]no[/red]"
        table.add_row(strategy, f"{tokens / passes:.2f}", f"{speed:.1f}", same)
    return table


if __name__ == "__main__":
    main()
