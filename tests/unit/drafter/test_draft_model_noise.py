"""A draft model and requests that sample: drafts with the target's noise, or drawn from a distribution that they carry."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from speculation.messages import DraftNoise
from speculation.tree import validate
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, Target, chain_of, commit, opened, source_of, wanted

SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "seed": 9, "min_p": 0.02},
]


def told(sampling: dict[str, object]) -> dict[str, object]:
    """What a trusted drafter is told of it."""
    if not sampling:
        return {}
    given = {name: value for name, value in sampling.items() if name != "temperature"}
    return {"temperature": sampling["temperature"], "noise": DraftNoise(**given)}  # type: ignore[arg-type]


@pytest.mark.examples(12)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("branches", [3, None, 1])
def test_the_target_as_its_own_draft_model_is_always_right(
    tiny_model: Path, sampling: dict[str, object], branches: int | None
) -> None:
    """Over 100 steps that accept all, or part, or nothing: every token of every chain is what the target chooses there."""
    source = source_of(tiny_model, length=3, eagle_topk=branches)
    chance = random.Random(5)
    session = opened(source, PROMPT, **told(sampling))
    drafted: list[tuple[int, list[int]]] = []
    nodes = 0
    for _ in range(110):
        (tree,) = source.draft([wanted(session, 40)])
        chain = chain_of(tree)
        assert len(chain) == 3
        nodes += len(tree)
        drafted.append((len(session.tokens), chain))
        # Whole chains with the next token or without, as when a draft comes late; else a part, and another token behind it.
        kept = chain[: chance.choice((3, 3, 2, 0))]
        commit(session, [*kept, chance.randrange(VOCAB)] if chance.random() < 0.7 or not kept else kept)
    assert nodes == 330 if branches == 1 else nodes > 600
    target = Target(tiny_model, **sampling)
    choices = target.choices(session.tokens)
    right = 0
    for start, chain in drafted:
        for depth, token in enumerate(chain):
            if chain[:depth] != session.tokens[start : start + depth]:
                break
            assert token == choices[start + depth - 1], (start, depth)
            right += 1
    assert right > 250


def test_sampled_chains_carry_the_distribution_they_were_drawn_from(tiny_model: Path) -> None:
    source = source_of(tiny_model, length=3)
    target = Target(tiny_model)
    drawn = set()
    for _ in range(20):
        session = opened(source, PROMPT, temperature=0.8, sampled=True)
        # The length depends on nothing that was drawn, not even where paths are unlikely.
        (tree,) = source.draft([wanted(session, 8, 0.9)])
        validate(tree, vocab_size=VOCAB, max_nodes=8)
        assert tree.parents == (-1, 0, 1) and len(tree.proposals) == 3
        drawn.add(tree.tokens)
        text, path = list(PROMPT), 1.0
        for token, proposal, score in zip(tree.tokens, tree.proposals, tree.scores, strict=True):
            q = torch.softmax(target.logits(text)[-1].double() / 0.8, -1)
            q = q[list(proposal.token_ids)]
            assert list(proposal.probabilities) == pytest.approx((q / q.sum()).tolist(), abs=1e-4)
            assert 1 < len(proposal.token_ids) <= 256
            path *= proposal.probabilities[proposal.token_ids.index(token)]
            assert score == pytest.approx(path)
            text.append(token)
    assert len(drawn) > 5
    (greedy,) = source.draft([wanted(opened(source, PROMPT, sampled=True))])
    assert not greedy.proposals


def test_without_noise_a_sampled_request_gets_the_likeliest(tiny_model: Path) -> None:
    source = source_of(tiny_model, eagle_topk=1)
    (cold,) = source.draft([wanted(opened(source, PROMPT))])
    (warm,) = source.draft([wanted(opened(source, PROMPT, temperature=2.0))])
    assert cold.tokens == warm.tokens and cold.scores[0] > warm.scores[0]
