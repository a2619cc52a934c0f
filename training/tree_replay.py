"""Tokens per target pass with trees: the drafter that is served, replayed along a data set's texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from services.drafter.sessions.replay import ReplayedText, replay_along
from services.drafter.sources.interfaces import ModelSource
from training.shards import TrainingSequence


def passes_of(
    source: ModelSource, sequences: Sequence[TrainingSequence], nodes: int, layers: tuple[int, ...] = (-1,)
) -> list[int]:
    """How many passes of the target each answer takes, behind its first token.

    Args:
        sequences: drafted for together, as concurrent requests are. Sampled ones are drafted without their noise, which the
            data do not hold: a drafter that is told it drafts better.
        nodes: most nodes of a tree.
        layers: of the sequences' states.
    """
    texts = [
        ReplayedText(
            tokens=tuple(each.tokens.tolist()),
            prompt_length=each.prompt_length,
            states=each.states,
            known=each.known,
            temperature=each.temperature,
        )
        for each in sequences
    ]
    passes = Counter(each.text for each in replay_along(source, texts, nodes, layers))
    return [passes[number] for number in range(len(texts))]


def tokens_per_pass(sequences: Sequence[TrainingSequence], passes: Sequence[int]) -> float:
    """Mean over all answers, behind their first tokens."""
    return sum(len(each.tokens) - each.prompt_length - 1 for each in sequences) / max(1, sum(passes))
