"""Recorded answers with the target's own states, along which drafters are replayed one request at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.replay.replay import Trace
from services.drafter.sessions.replay import ReplayedPass, ReplayedText, replay_along
from services.drafter.sources.interfaces import ModelSource
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows

# Positions in one pass of the target.
_CHUNK = 256
_SESSION = "known text"

States = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt and the target's greedy answer.

    Attributes:
        states: of every position but the last, [T - 1, h], by the layer as in ``Features.layers``.
    """

    trace: Trace
    states: dict[int, States]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.trace.prompt, *self.trace.output)


def read_states(target: TransformersTarget, trace: Trace, layers: Sequence[int]) -> KnownText:
    """The states of ``layers`` at all positions of a recorded answer; without layers, the text alone."""
    if not layers:
        return KnownText(trace, {})
    tokens = (*trace.prompt, *trace.output)[:-1]
    parts = []
    target.open(_SESSION, len(tokens))
    try:
        for begin in range(0, len(tokens), _CHUNK):
            chunk = tokens[begin : begin + _CHUNK]
            target.forward([Rows(request_id=_SESSION, context=begin, tokens=chunk, logits=0, layers=tuple(layers))])
            data = target.features(_SESSION, range(len(chunk)))
            parts.append(np.frombuffer(bytes(data.data), np.float16).reshape(data.rows, len(layers), -1))
            target.keep(_SESSION, begin, range(len(chunk)))
    finally:
        target.close(_SESSION)
    every = np.concatenate(parts)
    return KnownText(trace, {layer: np.ascontiguousarray(every[:, place]) for place, layer in enumerate(layers)})


@dataclass(slots=True)
class ReplayedTexts:
    """What a drafter would have achieved.

    Attributes:
        tokens: of the answers, the first ones included, which come with the passes over the prompts.
        drafting_s: of each draft but an answer's first.
    """

    tokens: int = 0
    texts: int = 0
    steps: list[ReplayedPass] = field(default_factory=list)
    drafting_s: list[float] = field(default_factory=list)

    @property
    def tau(self) -> float:
        """Tokens per pass behind the first token."""
        return (self.tokens - self.texts) / max(1, len(self.steps))

    def tau_by_task(self, tasks: Sequence[str]) -> dict[str, float]:
        """The same for each task; ``tasks`` of the texts in their order."""
        passes = Counter(tasks[step.text] for step in self.steps)
        taken = Counter[str]()
        for step in self.steps:
            taken[tasks[step.text]] += step.accepted + 1
        return {task: taken[task] / passes[task] for task in sorted(passes)}

    @property
    def call_reduction(self) -> float:
        """The target's passes of plain decoding over those that remain; both read the prompt in one."""
        return self.tokens / (self.texts + len(self.steps))


def replay_texts(
    source: ModelSource, texts: Iterable[tuple[KnownText, States | None]], layers: tuple[int, ...], nodes: int
) -> ReplayedTexts:
    """Draft along texts, one after the other, with trees of at most ``nodes`` nodes.

    Args:
        texts: with what the target reports of each position, of ``layers`` side by side; None: nothing.
    """
    result = ReplayedTexts()
    for number, (text, reported) in enumerate(texts):
        replayed = ReplayedText(tokens=text.tokens, prompt_length=len(text.trace.prompt), states=reported)
        steps = [replace(step, text=number) for step in replay_along(source, [replayed], nodes, layers)]
        result.steps += steps
        result.drafting_s += [step.drafting_s for step in steps[1:]]
        result.texts += 1
        result.tokens += len(text.trace.output)
    return result


def tree_states(
    target: TransformersTarget, text: KnownText, steps: Sequence[ReplayedPass], layer: int
) -> list[torch.Tensor]:
    """The states [1 + nodes, h] of ``layer`` in the target's pass of each step, of the last committed token and the tree."""
    tokens, found = text.tokens, []
    target.open(_SESSION, len(tokens) + max(len(step.tree) for step in steps) + 1)
    try:
        done = 0
        for step in steps:
            begin = step.length - 1
            for first in range(done, begin, _CHUNK):
                chunk = tokens[first : min(begin, first + _CHUNK)]
                target.forward([Rows(request_id=_SESSION, context=first, tokens=chunk, logits=0)])
                target.keep(_SESSION, first, range(len(chunk)))
            done = begin
            rows = (tokens[begin], *step.tree.tokens)
            target.forward(
                [Rows(request_id=_SESSION, context=begin, tokens=rows, parents=step.tree.parents, logits=1, layers=(layer,))]
            )
            data = target.features(_SESSION, range(len(rows)))
            found.append(torch.frombuffer(bytearray(bytes(data.data)), dtype=torch.float16).view(len(rows), -1).float())
            # The next chunk is written over the tree.
            target.keep(_SESSION, begin, [])
    finally:
        target.close(_SESSION)
    return found
