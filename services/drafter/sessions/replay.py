"""Replays models that draft along texts that the target has written (``speculation.replay``), many at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted, ModelSource, SourceSession
from speculation.replay import AnswerReplay
from speculation.types import EMPTY_TREE, Features, TokenTree

# Calls in which all prompts are read.
_MOST_CALLS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedText:
    """A text that a model drafts along.

    Attributes:
        states: of its positions, [T or T - 1, h] float16, by the layers that the target reports; None: none are.
        known: the positions whose states are known, as booleans; None: all.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    states: NDArray[np.float16] | None = None
    known: NDArray[np.bool_] | None = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplayedPass:
    """A pass of the target behind an answer's first token.

    Attributes:
        text: the text's number.
        length: tokens committed before it.
        accepted: drafted tokens that it takes.
        drafting_s: of the batch that the tree was drafted in.
    """

    text: int
    length: int
    tree: TokenTree
    accepted: int
    drafting_s: float


@dataclass(slots=True)
class _Session:
    text: ReplayedText
    answer: AnswerReplay
    session: SourceSession
    layers: tuple[int, ...]
    nodes: int
    states: KnownStates = field(default_factory=KnownStates)
    sent: int = 0

    def commit(self, tree: TokenTree) -> int:
        """Report a pass, with the states of the positions before its last token. Returns the tokens that it committed."""
        report = self.answer.accept(tree)
        self._send(self.answer.length - 1)
        self.session.observe(report)
        return len(report.committed)

    def _send(self, end: int) -> None:
        if (states := self.text.states) is None:
            return
        rows = np.arange(self.sent, end)
        if self.text.known is not None:
            rows = rows[self.text.known[self.sent : end]]
        self.sent = end
        # Runs of positions whose states are known.
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            if len(run):
                sent = np.ascontiguousarray(states[run], dtype=np.float16)
                count, width = sent.shape
                data, start = sent.tobytes(), int(run[0])
                self.states.add(
                    Features(data=data, rows=count, width=width, dtype="float16", start=start, layers=self.layers)
                )

    @property
    def wanted(self) -> DraftWanted:
        """Its part of a batch."""
        return DraftWanted(session=self.session, max_nodes=self.nodes, states=self.states)


def replay_along(
    source: ModelSource, texts: Sequence[ReplayedText], nodes: int, layers: tuple[int, ...] = (-1,)
) -> Iterator[ReplayedPass]:
    """The passes that texts take, drafted for together, as concurrent requests are.

    Args:
        nodes: most nodes of a tree.
        layers: of the texts' states.
    """
    opened = [_open(source, text, nodes, layers, f"replay-{number}") for number, text in enumerate(texts)]
    _read_prompts(source, opened)
    while live := [number for number, each in enumerate(opened) if not each.answer.over]:
        began = time.perf_counter()
        trees = source.draft([opened[number].wanted for number in live])
        drafting_s = time.perf_counter() - began
        for number, found in zip(live, trees, strict=True):
            tree, length = found or EMPTY_TREE, opened[number].answer.length
            yield ReplayedPass(number, length, tree, opened[number].commit(tree) - 1, drafting_s)
    for each in opened:
        each.session.close()


def _open(source: ModelSource, text: ReplayedText, nodes: int, layers: tuple[int, ...], name: str) -> _Session:
    answer = AnswerReplay(name, text.tokens, text.prompt_length, nodes)
    session = source.open(answer.opening(temperature=text.temperature))
    opened = _Session(text, answer, session, layers, nodes)
    # The first token comes with the pass over the prompt.
    opened.commit(EMPTY_TREE)
    return opened


def _read_prompts(source: ModelSource, opened: Sequence[_Session]) -> None:
    """Ask for drafts until each has come once: drafters read long texts in several calls."""
    waiting = list(opened)
    for _ in range(_MOST_CALLS):
        if not waiting:
            return
        trees = source.draft([each.wanted for each in waiting])
        waiting = [each for each, tree in zip(waiting, trees, strict=True) if tree is None]
