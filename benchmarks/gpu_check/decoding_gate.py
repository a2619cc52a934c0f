"""G8: how many tokens a second plain decoding makes in a loop, host included, and whether they depend on the load."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from benchmarks.gpu_check.bare_model import BareModel
from benchmarks.gpu_check.packings import rows_of
from benchmarks.gpu_check.verdicts import GateVerdict

# Of each request, by its name.
Texts = Mapping[str, list[int]]


def decoding(
    model: BareModel, requests: Sequence[int] = (1, 8, 64), prompt: int = 256, steps: int = 64, vocabulary: int = 128256
) -> GateVerdict:
    """G8.

    Args:
        requests: that are decoded together, ascending; each time the first ones are the same.
        prompt: tokens of each one's prompt.
    """
    texts: list[Texts] = []
    speeds: dict[int, float] = {}
    for count in requests:
        found, seconds = _decoded(model, count, prompt, steps, vocabulary)
        texts.append(found)
        speeds[count] = count * steps / seconds
    wrong = [
        f"request {name} beside {len(more) - 1}"
        for fewer, more in pairwise(texts)
        for name, text in fewer.items()
        if text != more[name]
    ]
    return judge_decoding(wrong, speeds)


def _decoded(model: BareModel, count: int, prompt: int, steps: int, vocabulary: int) -> tuple[Texts, float]:
    """Tokens of ``count`` requests, and the seconds of all steps."""
    texts: dict[str, list[int]] = {}
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        given = torch.randint(0, vocabulary, (prompt,), generator=generator).tolist()
        texts[str(number)] = [int(model.logits([rows_of(str(number), 0, given)])[-1].argmax())]

    # What follows may be behind more segments than the prompt.
    graph = model.captured([rows_of(name, prompt + steps, text) for name, text in texts.items()])
    start = time.perf_counter()
    for step in range(steps):
        graph.fill([rows_of(name, prompt + step, text[-1:]) for name, text in texts.items()])
        for text, token in zip(texts.values(), graph.replay()[:count].argmax(-1).tolist(), strict=True):
            text.append(token)
    return texts, time.perf_counter() - start


def judge_decoding(wrong: Sequence[str], speeds: Mapping[int, float]) -> GateVerdict:
    """The verdict on requests whose tokens differ; ``speeds``: tokens per second by the number of requests."""
    listed = ", ".join(f"{speed:.0f} with {count}" for count, speed in speeds.items())
    return GateVerdict(
        result="fail" if wrong else "pass",
        found=f"{len(wrong)} requests have other tokens, first: {wrong[0]}" if wrong
        else f"the same tokens at any load; tokens per second: {listed} at a time",
        follows="if G5 and G7 passed, look at the choice of tokens" if wrong
        else "plain decoding's speed without router and drafts: make gpu-bench says what they bring",
        figures={"tokens_per_second": {str(count): speed for count, speed in speeds.items()}, "differ": list(wrong)},
        table=[["requests", "tokens per second"], *([str(count), f"{speed:.1f}"] for count, speed in speeds.items())],
    )  # fmt: skip
