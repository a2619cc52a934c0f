"""``make demo``: runs the whole pipeline on a local Ray, answers three prompts, and compares every token.

A small index, of a code base and some files of Python's library, is built once, published in an embedded Redis, and served
by the retrieval service.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import outrider
from cli import index_commands
from cli.demo_tasks import ABOUT_BLEND, ABOUT_PLAIN, CODE_BASE, MAX_TOKENS, PLAIN, TASKS, Task
from cluster.models.target import resolve
from cluster.process.signals import stop_on_signals
from cluster.process.terminal import end_with
from cluster.service import serving
from cluster.settings.config import Settings, load
from retrieval_index.embedded import embedded_redis
from retrieval_index.manifest import read_manifest
from retrieval_index.store import IndexStore
from services.model_files.folder import tokenizer_digest
from speculation.errors import ConfigurationError

# Small files of the standard library.
CORPUS = ("dataclasses.py", "fractions.py", "types.py", "abc.py")
INDEX = "demo"

console = Console()


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoAnswer:
    """The answer to one task under one strategy."""

    task: Task
    strategy: str
    result: outrider.Generation


def main() -> None:
    stop_on_signals()
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        end_with(error)


def _run() -> None:
    start = time.perf_counter()
    settings = load(flags=["server.port=0"])
    folder = _index(settings)
    with embedded_redis() as redis:
        with IndexStore(redis, INDEX) as store:
            store.publish(folder)
        settings = load(flags=["server.port=0", f"retrieval.redis_url={redis}", f"retrieval.name={INDEX}"])
        with serving(settings, in_process=False, verbose=False) as addresses, outrider.Client(addresses.grpc) as client:
            took = time.perf_counter() - start
            console.print(f"Router, drafter, retrieval and verifier are up at {addresses.grpc} after {took:.0f} s.\n")
            console.print(_table(_ask_all(client)))
    console.print(f"Done in {time.perf_counter() - start:.0f} s; nothing is left running.")


def _index(settings: Settings) -> Path:
    """The folder of a small index, which is built at the first run and kept."""
    library = Path(sysconfig.get_paths()["stdlib"])
    model = resolve(settings.model, settings.cache_dir, say=console.print)
    key = f"{tokenizer_digest(model.path)} {sys.version} {CORPUS} {CODE_BASE}"
    folder = settings.cache_dir / "demo" / hashlib.sha256(key.encode()).hexdigest()[:12]
    try:
        read_manifest(folder)
    except ConfigurationError:
        console.print("Building a small index (once)")
        with tempfile.TemporaryDirectory() as temporary:
            code = Path(temporary) / "code_base.py"
            code.write_text(CODE_BASE, encoding="utf-8")
            corpus = [code, *(library / name for name in CORPUS)]
            index_commands.build(corpus=corpus, out_folder=folder, keep=1.0, score_tokens=64)
    return folder


def _ask_all(client: outrider.Client) -> list[DemoAnswer]:
    """Answer every task with plain decoding, with the strategies it is meant for, and with blend."""
    answers = []
    for task in TASKS:
        about = {PLAIN: ABOUT_PLAIN, **task.strategies, "blend": ABOUT_BLEND}
        console.rule(f"{task.name} ({TASKS.index(task) + 1} of {len(TASKS)})")
        first, *more = task.message.splitlines()
        console.print(f"[bold]> {first}[/bold]{f' (and {len(more)} lines)' if more else ''}\n", highlight=False)
        for strategy, what in about.items():
            answers.append(DemoAnswer(task=task, strategy=strategy, result=_ask(client, strategy, task)))
            result = answers[-1].result
            console.print(
                f"[bold]{strategy}[/bold]: {result.speculative_decoding.mean_acceptance_length:.2f} tokens per pass, "
                f"{result.timing.tokens_per_second:.0f} tokens per second: {what}\n",
                highlight=False,
            )
    return answers


def _ask(client: outrider.Client, strategy: str, task: Task) -> outrider.Generation:
    """One answer. Plain decoding's is printed as it arrives; the others have the same text."""
    messages = [{"role": "user", "content": task.message}]
    with client.stream(messages=messages, strategy=strategy, max_tokens=MAX_TOKENS, temperature=0) as stream:
        for chunk in stream:
            if strategy == PLAIN:
                console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
    if strategy == PLAIN:
        console.print("\n")
    if stream.result is None:
        raise outrider.InternalError("the server ended the stream without a result")
    return stream.result


def _table(answers: Sequence[DemoAnswer]) -> Table:
    table = Table(title=f"{len(TASKS)} prompts, greedy, up to {MAX_TOKENS} tokens each", title_justify="left")
    for column in ("prompt", "strategy", "tokens", "per pass", "per second", "x plain", "same"):
        table.add_column(column, justify="left" if column in ("prompt", "strategy") else "right", no_wrap=True)
    plain = {answer.task.name: answer.result for answer in answers if answer.strategy == PLAIN}
    for answer in answers:
        result, reference = answer.result, plain[answer.task.name]
        speed = result.timing.tokens_per_second
        same = "yes" if result.token_ids == reference.token_ids else "[red]no[/red]"
        table.add_row(
            answer.task.name if answer.strategy == PLAIN else "",
            answer.strategy,
            str(result.usage.completion_tokens),
            f"{result.speculative_decoding.mean_acceptance_length:.2f}",
            f"{speed:.1f}",
            f"{speed / reference.timing.tokens_per_second:.2f}",
            same,
            end_section=answer.strategy == "blend",
        )
    return table


if __name__ == "__main__":
    main()
