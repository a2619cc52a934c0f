"""A model source without a model, which reads hidden states of three layers. Tests can delay it, hang it or make it raise.

It is a template for real ones: ``register`` does what entries in ``speculation/sources.py`` and ``services/drafter/sources/catalogue.py`` do for a real one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.sources.catalogue import MAKERS
from services.drafter.sources.interfaces import DraftWanted
from speculation.messages import OpenSession, StepReport
from speculation.sources import SOURCES, SourceSpec
from speculation.tree import chain
from speculation.types import TokenTree

NAME = "double"
LAYERS = (1, 2, -1)
SPEC = SourceSpec(name=NAME, kind="model", nodes=4, layers=LAYERS, prompt_features=True)


class ModelDouble:
    """Drafts given tokens, and records its calls.

    Attributes:
        answer: the tokens of every chain; None: what followed the last token when it occurred before.
        delay_s: how long a batch takes, in seconds.
        stuck: while it is set, no batch ends.
        fails_for: sessions for which it raises, "" for all.
        batches: the sessions of every batch.
        drafts: by session, how many there were since it was opened.
        masked: by session, the committed positions without states in its last draft.
        states: by session, the bytes of the states present in its last draft, by position.
    """

    def __init__(self, answer: Sequence[int] | None = None, layers: tuple[int, ...] = LAYERS) -> None:
        self.answer = answer
        self.layers = layers
        self.delay_s = 0.0
        self.stuck = threading.Event()
        self.fails_for: set[str] = set()
        self.batches: list[list[str]] = []
        self.masked: dict[str, list[int]] = {}
        self.states: dict[str, dict[int, bytes]] = {}
        self.opened: list[str] = []
        self.drafts: Counter[str] = Counter()
        self.closed: list[str] = []
        self.forgotten: list[str] = []
        self.threads: set[str] = set()

    def open(self, message: OpenSession) -> _Session:
        self.threads.add(threading.current_thread().name)
        self.opened.append(message.session_id)
        self.drafts[message.session_id] = 0
        return _Session(self, message)

    def draft(self, batch: Sequence[DraftWanted]) -> list[TokenTree]:
        self.threads.add(threading.current_thread().name)
        self.batches.append([wanted.session.id for wanted in batch])
        time.sleep(self.delay_s)
        while self.stuck.is_set():
            time.sleep(0.005)
        if "" in self.fails_for or any(wanted.session.id in self.fails_for for wanted in batch):
            raise RuntimeError("planted failure")
        return [self._draft(wanted) for wanted in batch]

    def forget(self, tenant: str) -> None:
        self.forgotten.append(tenant)

    def _draft(self, wanted: DraftWanted) -> TokenTree:
        session, states = wanted.session, wanted.states
        self.drafts[session.id] += 1
        found = {position: row for position in range(len(session.tokens)) if (row := states.of(position, self.layers))}
        self.states[session.id] = {position: row.data for position, row in found.items()}
        # The last token has no state yet: it has not been computed.
        self.masked[session.id] = [position for position in range(len(session.tokens) - 1) if position not in found]
        tokens = session.followers() if self.answer is None else self.answer
        return chain(
            list(tokens)[: wanted.max_nodes], NAME, [0.9 ** (n + 1) for n in range(min(len(tokens), wanted.max_nodes))]
        )


class _Session:
    def __init__(self, model: ModelDouble, message: OpenSession) -> None:
        self.id = message.session_id
        self.tokens = list(message.tokens)
        self._model = model

    def followers(self) -> list[int]:
        last = self.tokens[-1]
        before = [place for place in range(len(self.tokens) - 1) if self.tokens[place] == last]
        return self.tokens[before[-1] + 1 :] if before else []

    def observe(self, report: StepReport) -> None:
        self._model.threads.add(threading.current_thread().name)
        self.tokens += report.committed

    def close(self) -> None:
        self._model.closed.append(self.id)


# What ``make`` returns.
_next = ModelDouble()


def make(config: DrafterConfig) -> ModelDouble:
    return _next


def register(monkeypatch: pytest.MonkeyPatch, double: ModelDouble | None = None, spec: SourceSpec = SPEC) -> ModelDouble:
    """Make the double known to drafters, routers and verifiers for the duration of a test."""
    double = double or ModelDouble()
    monkeypatch.setitem(SOURCES, spec.name, spec)
    monkeypatch.setitem(MAKERS, spec.name, "tests.drafters.model_source:make")
    monkeypatch.setattr("tests.drafters.model_source._next", double)
    return double
