"""Are our tokens those of transformers' ``generate``? Every strategy, alone and several at a time, in float32.

    python -m benchmarks.lossless --prompts question.jsonl --per-group 10 --max-tokens 128

A difference is shown with its position and the two logits there: a near tie that another order of summation decides is a
fact about floating point, anything else a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.prompts import Prompt, read_prompts
from cluster.build import Pipeline, in_process
from cluster.config import load
from cluster.models import ResolvedModel, resolve
from speculation.messages import ChatMessage, ClientRequest, Completion, TextChunk
from speculation.types import SamplingParams

STRATEGIES = ("autoregressive", "prompt_lookup")
SAMPLED: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=0.8, penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}
console = Console()

Answers = list[list[int]]


async def ask(
    pipeline: Pipeline, strategy: str, text: str, max_tokens: int, sampling: dict[str, Any]
) -> tuple[list[int], Completion]:
    """One answer's token ids, and its terminal message."""
    request = ClientRequest(
        input=(ChatMessage(role="user", content=text),),
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, **sampling),
        seed_given=True,
        max_tokens_given=True,
        strategy=strategy,
    )
    tokens: list[int] = []
    async for event in pipeline.router.generate(request):
        if isinstance(event, TextChunk):
            tokens += event.token_ids
        else:
            completion = event
    return tokens, completion


async def ask_all(
    pipeline: Pipeline, strategy: str, prompts: Sequence[Prompt], max_tokens: int, at_once: int, sampling: dict[str, Any]
) -> tuple[list[tuple[list[int], Completion]], float]:
    """All answers, ``at_once`` at a time, and the seconds that they took."""
    gate = asyncio.Semaphore(at_once)

    async def one(text: str) -> tuple[list[int], Completion]:
        async with gate:
            return await ask(pipeline, strategy, text, max_tokens, sampling)

    start = time.perf_counter()
    answers = await asyncio.gather(*(one(text) for _, text in prompts))
    return list(answers), time.perf_counter() - start


class Reference:
    """transformers' own greedy decoding."""

    def __init__(self, model: ResolvedModel) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)

    def answers(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[Answers, float]:
        """Token ids, and the seconds that they took."""
        start = time.perf_counter()
        answers = []
        for prompt in track(prompts, "transformers", console=console):
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            output = self._model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            answers.append(output[0, len(prompt) :].tolist())
        return answers, time.perf_counter() - start

    def top_two(self, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """The two largest logits after ``tokens``, and whose they are."""
        with torch.inference_mode():
            values, ids = self._model(torch.tensor([tokens])).logits[0, -1].topk(2)
        return values.tolist(), ids.tolist()


def explain(reference: Reference, prompt: Sequence[int], ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """Where two answers part, and how close the decision was."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    logits, ids = reference.top_two([*prompt, *theirs[:at]])
    return {"position": at, "ours": ours[at : at + 1], "theirs": theirs[at : at + 1], "top_two": ids, "logits": logits}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one object."""
    settings = load()
    model = resolve(settings.model, settings.cache_dir, say=console.print)
    prompts = read_prompts(arguments.prompts, arguments.per_group)
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens, "greedy": [], "sampled": []}
    runs: dict[tuple[str, int], Answers] = {}
    async with in_process(settings, model) as pipeline:
        await ask(pipeline, STRATEGIES[0], "Hello", 8, {})
        for at_once in (1, arguments.concurrency):
            for strategy in STRATEGIES:
                answers, seconds = await ask_all(pipeline, strategy, prompts, arguments.max_tokens, at_once, {})
                runs[strategy, at_once] = [tokens for tokens, _ in answers]
                prompt_ids = [completion.prompt_token_ids for _, completion in answers]
                report["greedy"].append(summary(strategy, at_once, answers, seconds))
                console.print(json.dumps(report["greedy"][-1]))
        for name, sampling in SAMPLED.items():
            chosen = prompts[:: max(1, len(prompts) // 12)]
            outputs = []
            for at_once in (1, arguments.concurrency):
                for strategy in STRATEGIES:
                    answers, _ = await ask_all(pipeline, strategy, chosen, arguments.max_tokens // 2, at_once, sampling)
                    outputs.append([tokens for tokens, _ in answers])
            same = all(output == outputs[0] for output in outputs)
            report["sampled"].append({"sampling": name, "prompts": len(chosen), "all_equal": same})
            console.print(report["sampled"][-1])
    compare(report, Reference(model), prompt_ids, runs, arguments.max_tokens)
    return report


def summary(strategy: str, at_once: int, answers: list[tuple[list[int], Completion]], seconds: float) -> dict[str, Any]:
    """One row."""
    tokens = sum(len(ids) for ids, _ in answers)
    steps = sum(completion.stats.num_spec_steps for _, completion in answers)
    return {
        "strategy": strategy,
        "at_once": at_once,
        "tokens": tokens,
        "tokens_per_pass": tokens / steps,
        "tokens_per_second": tokens / seconds,
    }


def compare(
    report: dict[str, Any],
    reference: Reference,
    prompt_ids: list[tuple[int, ...]],
    runs: dict[tuple[str, int], Answers],
    max_tokens: int,
) -> None:
    """Add to every row how many answers equal transformers', and what the others are about."""
    theirs, seconds = reference.answers(prompt_ids, max_tokens)
    report["transformers_tokens_per_second"] = sum(map(len, theirs)) / seconds
    plain = runs[STRATEGIES[0], 1]
    for row in report["greedy"]:
        ours = runs[row["strategy"], row["at_once"]]
        row["equal_to_plain"] = sum(a == b for a, b in zip(ours, plain, strict=True))
        row["equal_to_transformers"] = sum(a == b for a, b in zip(ours, theirs, strict=True))
        row["differences"] = [
            {"prompt": index, **explain(reference, prompt_ids[index], a, b)}
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True))
            if a != b
        ]


def show(report: dict[str, Any]) -> None:
    """A table."""
    table = Table(title=f"{report['prompts']} prompts, greedy, up to {report['max_tokens']} tokens", title_justify="left")
    for column in ("strategy", "at once", "tokens/pass", "tok/s", "equal to plain", "equal to transformers"):
        table.add_column(column)
    for row in report["greedy"]:
        table.add_row(
            row["strategy"],
            str(row["at_once"]),
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['equal_to_plain']}/{report['prompts']}",
            f"{row['equal_to_transformers']}/{report['prompts']}",
        )
    console.print(table)
    console.print(f"transformers generate: {report['transformers_tokens_per_second']:.1f} tok/s")
    for row in report["greedy"]:
        for difference in row["differences"]:
            console.print(row["strategy"], row["at_once"], difference)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench or HumanEval jsonl, or plain text")
    parser.add_argument("--per-group", type=int, default=10, help="prompts of each group")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time in the batched runs")
    parser.add_argument("--out", type=Path, help="write the whole report here as JSON")
    arguments = parser.parse_args()
    report = asyncio.run(measure(arguments))
    show(report)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
