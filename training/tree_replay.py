"""Tokens per target pass with trees, by replay: the drafter that is served drafts along texts that the target has written.

Whatever is drafted, the target would have written the same text. So the text itself says how much of a tree is accepted,
and no pass of the target is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.drafter.interfaces import DraftWanted, ModelSource, SourceSession
from services.drafter.sessions.known_states import KnownStates
from speculation.messages import OpenSession, StepReport
from speculation.prefix import EMPTY_HASH, extend_hash
from speculation.tree import follow
from speculation.types import EMPTY_TREE, Features
from training.shards import TrainingSequence

# Calls in which all prompts are read.
_MOST_CALLS = 256


@dataclass(slots=True)
class _Replayed:
    sequence: TrainingSequence
    layers: tuple[int, ...]
    session: SourceSession
    nodes: int
    name: str
    # Tokens committed; of the answer's, the first comes with the pass over the prompt.
    length: int
    states: KnownStates = field(default_factory=KnownStates)
    sent: int = 0
    passes: int = 0

    def commit(self, count: int) -> None:
        """Report the next ``count`` tokens of the text, with the states of the positions before the last one."""
        tokens = self.sequence.tokens
        committed = tuple(tokens[self.length : self.length + count].tolist())
        self.length += count
        self._send()
        self.session.observe(
            StepReport(
                session_id=self.name,
                committed=committed,
                length=self.length,
                prefix_hash=extend_hash(EMPTY_HASH, tokens[: self.length].tolist()),
                accepted_path=tuple(range(count - 1)),
                max_nodes=self.nodes,
            )
        )

    def _send(self) -> None:
        end = self.length - 1
        rows = np.arange(self.sent, end)[self.sequence.known[self.sent : end]]
        # Runs of positions whose states are known.
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            if len(run):
                states = np.ascontiguousarray(self.sequence.states[run], dtype=np.float16)
                self.states.add(
                    Features(
                        data=states.tobytes(),
                        rows=len(run),
                        width=states.shape[1],
                        dtype="float16",
                        start=int(run[0]),
                        layers=self.layers,
                    )
                )
        self.sent = end

    @property
    def wanted(self) -> DraftWanted:
        """Its part of a batch."""
        return DraftWanted(session=self.session, max_nodes=self.nodes, states=self.states)

    @property
    def rest(self) -> list[int]:
        """The tokens that are still to come."""
        rest: list[int] = self.sequence.tokens[self.length :].tolist()
        return rest


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
    replayed = [_open(source, sequence, nodes, layers, f"replay-{number}") for number, sequence in enumerate(sequences)]
    _read_prompts(source, replayed)
    while live := [each for each in replayed if each.rest]:
        for each, tree in zip(live, source.draft([each.wanted for each in live]), strict=True):
            each.passes += 1
            each.commit(min(follow(tree or EMPTY_TREE, each.rest) + 1, len(each.rest)))
    for each in replayed:
        each.session.close()
    return [each.passes for each in replayed]


def tokens_per_pass(sequences: Sequence[TrainingSequence], passes: Sequence[int]) -> float:
    """Mean over all answers, behind their first tokens."""
    return sum(len(each.tokens) - each.prompt_length - 1 for each in sequences) / max(1, sum(passes))


def _open(source: ModelSource, sequence: TrainingSequence, nodes: int, layers: tuple[int, ...], name: str) -> _Replayed:
    message = OpenSession(
        session_id=name,
        tokens=tuple(sequence.tokens[: sequence.prompt_length].tolist()),
        prompt_length=sequence.prompt_length,
        sources=(),
        max_nodes=nodes,
        temperature=sequence.temperature,
    )
    found = _Replayed(sequence, layers, source.open(message), nodes, name, sequence.prompt_length)
    found.commit(1)
    return found


def _read_prompts(source: ModelSource, opened: Sequence[_Replayed]) -> None:
    """Ask for drafts until each has come once: drafters read long texts in several calls."""
    waiting = list(opened)
    for _ in range(_MOST_CALLS):
        if not waiting:
            return
        trees = source.draft([each.wanted for each in waiting])
        waiting = [each for each, tree in zip(waiting, trees, strict=True) if tree is None]
