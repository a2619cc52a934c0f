"""``make demo``: the whole pipeline on a local Ray, three prompts, answers streamed, every token compared."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

import outrider
from cluster.config import load
from cluster.service import running

PROMPTS = (
    "Fix the spelling and repeat the whole text: Teh quick brown fox jumps over teh lazy dog. Teh dog sleeps. Teh fox runs.",
    "Write a Python class Point with fields x and y, and methods __add__, __sub__ and __eq__.",
    "Explain in three sentences why the sky is blue.",
)
PLAIN = "autoregressive"
STRATEGIES = (PLAIN, "prompt_lookup")
MAX_TOKENS = 64

console = Console()


def main() -> None:
    """Run the demo."""
    start = time.perf_counter()
    settings = load(flags=["server.port=0"])
    with running(settings, in_process=False, verbose=False) as address, outrider.Client(address) as client:
        console.print(f"Router, drafter and verifier are up at {address} after {time.perf_counter() - start:.0f} s.\n")
        results = {strategy: _ask_all(client, strategy) for strategy in STRATEGIES}
        console.print(_table(results))
    console.print(f"Done in {time.perf_counter() - start:.0f} s; nothing is left running.")


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
