"""Drafters of hidden states and requests that sample: with the target's noise, or drawn from what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.heads.eagle.source import TreeForm
from services.drafter.sessions.drawn_proposals import draw_with
from services.drafter.sessions.known_states import KnownStates
from services.model_files.generation_config import ModelProcessors
from speculation.choose import choose
from speculation.messages import DraftNoise
from speculation.tree import ROOT, validate
from speculation.types import SamplingParams
from tests.drafters.feature_sources import (
    EAGLE,
    VOCABULARY,
    after,
    draft,
    head,
    known,
    opening,
    report,
    source,
    states,
    text,
)


@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}], ids=str
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_with_the_targets_own_distribution_its_choice_comes_first(temperature: float, cut: dict[str, Any]) -> None:
    """At every position and every depth: the target chooses with the same noise."""
    from services.verifier.choosing.walks import RequestState
    from services.verifier.model.target_port import Sampling

    params = SamplingParams(temperature=temperature, seed=11, **cut)
    own, tokens = source(), text(6)
    model, start = head(EAGLE), len(tokens)
    held = known(range(60))
    session = own.open(opening(tokens, temperature=temperature, noise=DraftNoise(seed=11, **cut)))
    cutting = RequestState(Sampling(params=params, prompt_length=6), frozenset(), ModelProcessors()).truncation

    def choice(path: Sequence[int]) -> int:
        whole = KnownStates()
        whole.add(states(range(len(tokens) - 1)))
        logits = model.logits(after(model, tokens, whole, path).hidden, model.vocabulary).float() / temperature
        return choose(logits if cutting is None else cutting(logits, ()), params, params.seed, len(tokens) + len(path))

    while len(tokens) < start + 12:
        path: list[int] = []
        tree = draft(own, session, held, 40)
        node = ROOT
        while len(path) < 3 and node in tree.parents:
            node = tree.parents.index(node)
            path.append(tree.tokens[node])
            assert path[-1] == choice(path[:-1])
        assert path
        tokens += path
        report(session, path)


@pytest.mark.exhaustive
def test_a_chain_is_drawn_from_what_it_says() -> None:
    own = source(form=TreeForm(steps=3), draw=draw_with(np.random.default_rng(0)))
    model, tokens, held = head(EAGLE), text(8), known(range(7))
    session = own.open(opening(tokens, temperature=0.8, sampled=True))
    q = torch.softmax(model.logits(after(model, tokens, held, ()).hidden, model.vocabulary) / 0.8, -1)
    counts = np.zeros(VOCABULARY)
    for _ in range(1500):
        tree = draft(own, session, held, 3)
        validate(tree, vocab_size=VOCABULARY, max_nodes=3)
        assert tree.parents == (-1, 0, 1)
        counts[tree.tokens[0]] += 1
    first = dict(zip(tree.proposals[0].token_ids, tree.proposals[0].probabilities, strict=True))
    assert first == pytest.approx({token: float(q[token]) for token in first}, rel=1e-4)
    assert sum(first.values()) == pytest.approx(1) and len(first) == VOCABULARY
    deviation = (counts - 1500 * q.numpy()) / np.sqrt(1500 * q.numpy() + 1)
    assert np.abs(deviation).max() < 4.5
    second = torch.softmax(model.logits(after(model, tokens, held, tree.tokens[:1]).hidden, model.vocabulary) / 0.8, -1)
    assert tree.proposals[1].probabilities[0] == pytest.approx(float(second.max()), rel=1e-4)
    # Its length depends on nothing that is drawn; greedy requests need no draws.
    assert len(draft(own, session, held, 3, min_probability=1.0)) == 3
    greedy = draft(own, own.open(opening(tokens, sampled=True)), held, 3)
    assert not greedy.proposals
