"""How long a model's draft takes: it drafts along a known text, one request at a time, with random states.

What a draft takes depends on its shapes and on how many tokens a pass has committed, not on what the numbers say. So the
text's own tokens are accepted, as many as with the default model, whatever was drafted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted, ModelSource
from speculation.errors import ConfigurationError
from speculation.replay import AnswerReplay
from speculation.tree import chain
from speculation.types import EMPTY_TREE, Features

# Calls in which a drafter may read a prompt; drafts that are not counted.
_MOST_CALLS, _WARM = 64, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CostText:
    """A text to draft along, and what the target reports of it.

    Attributes:
        width: of the target's states.
        layers: those whose states are reported; empty: none.
    """

    tokens: tuple[int, ...]
    prompt_length: int
    width: int
    layers: tuple[int, ...]


def draft_seconds(source: ModelSource, text: CostText, nodes: int, tau: float, drafts: int) -> float:
    """The median of ``drafts`` drafts of at most ``nodes`` nodes, of which each pass accepts ``tau`` - 1 on average.

    Raises:
        ConfigurationError: it drafts nothing.
    """
    answer = AnswerReplay("cost", text.tokens, text.prompt_length, nodes)
    session = source.open(answer.opening())
    states, random, times, owed = KnownStates(), np.random.default_rng(3), list[float](), 0.0

    def commit(count: int) -> None:
        before = answer.length
        report = answer.accept(chain(text.tokens[before : before + count], "text") if count else EMPTY_TREE)
        _report(states, text, random, start=0 if before == text.prompt_length else before - 1, stop=answer.length - 1)
        session.observe(report)

    # The first token comes with the pass over the prompt.
    commit(0)
    for _ in range(_MOST_CALLS + _WARM + drafts):
        if answer.over or len(times) == _WARM + drafts:
            break
        began = time.perf_counter()
        (tree,) = source.draft([DraftWanted(session=session, max_nodes=nodes, states=states)])
        seconds = time.perf_counter() - began
        if tree is None:
            continue
        times.append(seconds)
        # Whole tokens, tau on average.
        owed += tau
        commit(max(0, int(owed) - 1))
        owed -= max(1, int(owed))
    session.close()
    if len(times) <= _WARM:
        raise ConfigurationError("a drafter has drafted nothing along a text: name longer prompts", about="--prompts")
    return statistics.median(times[_WARM:])


def _report(states: KnownStates, text: CostText, random: np.random.Generator, *, start: int, stop: int) -> None:
    """States of the positions from ``start`` to before ``stop``."""
    if not text.layers or stop <= start:
        return
    numbers = random.standard_normal((stop - start, text.width * len(text.layers))).astype(np.float16)
    states.add(
        Features(
            data=numbers.tobytes(),
            rows=stop - start,
            width=numbers.shape[1],
            dtype="float16",
            start=start,
            layers=text.layers,
        )
    )


def joined(texts: Sequence[tuple[int, ...]], tokens: int) -> tuple[int, ...]:
    """The first ``tokens`` tokens of texts behind each other, over and over.

    >>> joined([(1, 2), (3,)], 5)
    (1, 2, 3, 1, 2)
    """
    whole = [token for text in texts for token in text]
    return tuple((whole * (1 + tokens // len(whole)))[:tokens])
