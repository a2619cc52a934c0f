"""A draft model changes no token, and its drafts are accepted: greedily, with the request's own noise, and drawn from q."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.drafter.draft_model.model import DraftLM
from services.drafter.draft_model.source import DraftModelSource
from services.drafter.draft_model.vocabulary_map import VocabularyMap
from services.drafter.sessions.known_states import KnownStates
from services.drafter.sources.interfaces import DraftWanted
from services.drafter.stopping.lengths import Static
from speculation.messages import OpenSession
from speculation.types import EMPTY_TREE, Plan
from tests.engine.fakes import collect, request
from tests.lossless.enumeration import VOCAB, Oracle, Output, distance, draft, outcomes, plain, sampled_tree
from tests.lossless.test_enumeration import EXACT, by_rejection
from tests.lossless.test_strategies import ANSWER, PROMPTS, plain_answers, verifier
from tests.running.patience import PATIENCE_S
from tests.tiny_models.tiny import make_tiny_model

NAME = "draft_model"


async def check(
    folder: Path, link: str, plan: Plan, sampling: dict[str, object], *, nodes: int = 0, accepted: int = 1
) -> None:
    """Answer until so many nodes of the draft model have been verified and accepted: every answer is plain decoding's.

    How often that is depends on how fast the machine loads and runs the draft model; nobody waits for it.
    """
    expected = await plain_answers(folder, sampling)
    options = {"max_tokens": ANSWER, "ignore_eos": True, **sampling}
    done = 0
    async with verifier(folder, "real", link, "fixed", draft_deadline_s=5.0) as running, asyncio.timeout(PATIENCE_S):
        while done < accepted or running.loop.stats.nodes_by_source[NAME] < nodes:
            wanted = [request(f"r{i}", prompt, plan, **options) for i, prompt in enumerate(PROMPTS)]
            results = await asyncio.gather(*(collect(running.loop, one) for one in wanted))
            assert [tokens for tokens, _, _ in results] == expected
            done += sum(step.accepted_sources.count(NAME) for _, _, progress in results for step in progress)


@pytest.mark.examples(3)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "presence_penalty": 0.5}],
    ids=str,
)
async def test_it_changes_no_token(tiny_model: Path, link: str, sampling: dict[str, object]) -> None:
    plan = Plan(strategy=NAME, sources=(NAME,), max_nodes=8)
    await check(tiny_model, link, plan, sampling, nodes=80, accepted=8)


async def test_beside_text_sources(tiny_model: Path) -> None:
    plan = Plan(strategy="any", sources=("suffix", "recycling", NAME), max_nodes=12, observe_top_k=8)
    await check(tiny_model, "in_process", plan, {})


@pytest.mark.examples(2)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
async def test_rejection_with_one_possible_token_is_plain_decoding(tiny_model: Path, link: str) -> None:
    """With top_k 1 the target's distribution is certain, while the drafts are drawn from all of q."""
    sampling: dict[str, object] = {"temperature": 0.7, "top_k": 1, "seed": 2}
    plan = Plan(strategy=NAME, sources=(NAME,), max_nodes=8, acceptance="rejection")
    await check(tiny_model, link, plan, sampling, nodes=40, accepted=2)


class _Drawn:
    """A ``Draw`` that draws what it is told, and notes how likely that was."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = iter(script)
        self.probability = 1.0

    def __call__(self, weights: np.ndarray) -> int:
        index = next(self._script)
        self.probability *= float(weights[index])
        return index


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_its_sampled_chains_are_lossless_under_rejection(tmp_path: Path, length: int, temperature: float) -> None:
    """Every outcome of the draws and of the rule's coins, with the chains that the source really sends."""
    folder = make_tiny_model(tmp_path / "four", vocab_size=VOCAB, initializer_range=0.2)
    lm = DraftLM(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder)
    message = OpenSession(
        session_id="s",
        tokens=(3, 1, 2),
        prompt_length=3,
        sources=(NAME,),
        max_nodes=8,
        temperature=temperature,
        sampled=True,
    )
    total: dict[Output, float] = defaultdict(float)
    drawn = set()
    for script in product(range(VOCAB), repeat=length):
        draw = _Drawn(script)
        source = DraftModelSource(lm, VocabularyMap(draft_size=VOCAB), Static(length), longest=64, draw=draw)
        # Unlikely paths are drafted, too: their length must not depend on what was drawn.
        wanted = DraftWanted(session=source.open(message), max_nodes=8, min_probability=0.5, states=KnownStates())
        (tree,) = source.draft([wanted])
        assert len(tree) == length == len(tree.proposals)
        drawn.add(tree.tokens)
        for output, probability in outcomes(partial(by_rejection, tree)).items():
            total[output] += draw.probability * probability
    assert len(drawn) == VOCAB**length
    assert sum(total.values()) == pytest.approx(1)
    assert distance(total, plain()) < EXACT


def test_stopping_by_what_was_drawn_would_not_be() -> None:
    """Why a sampled chain's length is settled beforehand: a chain that is dropped where it is longer than there is room."""

    def run(oracle: Oracle) -> Output:
        tree = sampled_tree(oracle, draft, 1, 2, True)
        # A policy that goes on behind token 0 only, and a verifier with room for one node.
        return by_rejection(EMPTY_TREE if tree.tokens[0] == 0 else tree, oracle)

    assert distance(outcomes(run), plain()) > 1e-3
