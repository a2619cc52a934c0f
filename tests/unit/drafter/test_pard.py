"""PARD: a draft model with a mask token guesses all levels in one pass; nothing of its text is computed twice or wrongly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.models.drafters import by_kernels
from services.drafter.config import StopConfig
from services.drafter.heads.files.kinds import inspect
from speculation.errors import ConfigurationError
from speculation.tree import depths, path_to, validate
from speculation.types import TokenTree
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, commit, opened, source_of, wanted
from tests.running.refusals import refuses
from tests.tiny_models.draft_models import make_parallel_draft

MASK, LEVELS = 300, 4


@pytest.fixture(scope="module")
def draft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parallel_draft(tiny_model, tmp_path_factory.mktemp("pard") / "model", MASK)


def levels(folder: Path, text: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """[LEVELS, vocabulary], log-probabilities by transformers' own plain pass over the text and masks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*text, *[MASK] * (LEVELS - 1)]])).logits[0, -LEVELS:]
    found: torch.Tensor = (logits / temperature).log_softmax(-1)
    return found


def is_product(tree: TokenTree, logs: torch.Tensor) -> bool:
    """Whether the tree's scores are the products of these levels."""
    for node in range(len(tree)):
        path = [tree.tokens[each] for each in path_to(tree, node)]
        if not np.isclose(
            np.log(tree.scores[node]), sum(float(logs[at, token]) for at, token in enumerate(path)), atol=1e-3
        ):
            return False
    return True


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_drafts_are_the_trees_of_one_plain_pass(tiny_model: Path, draft: Path, kernels: bool) -> None:
    source = source_of(tiny_model, draft, length=LEVELS, draft_kernels=by_kernels if kernels else None)
    sessions = [opened(source, PROMPT), opened(source, PROMPT[:5])]
    passes = 0
    own = source._lm.logits

    def counted(parts: Sequence[object]) -> object:
        nonlocal passes
        passes += 1
        return own(parts)  # type: ignore[arg-type]

    source._lm.logits = counted  # type: ignore[method-assign, assignment]
    for committed in ([], [9, 17], [MASK, 3], [40]):
        for session in sessions:
            commit(session, committed)
        passes = 0
        trees = source.draft([wanted(session, 30) for session in sessions])
        assert passes == 1
        for session, tree in zip(sessions, trees, strict=True):
            assert tree is not None and len(tree) == 30
            validate(tree, vocab_size=VOCAB, max_nodes=30)
            assert 1 < max(depths(tree)) <= LEVELS and is_product(tree, levels(draft, session.tokens))


def test_accepted_drafts_are_read_as_text(tiny_model: Path, draft: Path) -> None:
    """Rows of masks are no rows of the tokens that they guessed."""
    source = source_of(tiny_model, draft, length=LEVELS)
    session = opened(source, PROMPT)
    for _ in range(3):
        (tree,) = source.draft([wanted(session, 12)])
        assert tree is not None
        commit(session, [tree.tokens[node] for node in path_to(tree, max(range(len(tree)), key=depths(tree).__getitem__))])
        assert is_product(source.draft([wanted(session, 12)])[0] or TokenTree(), levels(draft, session.tokens))


def test_settings_and_the_heuristic_bound_it(tiny_model: Path, draft: Path) -> None:
    source = source_of(tiny_model, draft, length=LEVELS, num_steps=2, eagle_topk=3)
    (tree,) = source.draft([wanted(opened(source, PROMPT), 40)])
    assert tree is not None and len(tree) == 3 + 9 and max(depths(tree)) == 2
    heuristic = StopConfig(policy="heuristic_transient", num_assistant_tokens=3)
    source = source_of(tiny_model, draft, stop=heuristic)
    session = opened(source, PROMPT)
    for expected in (3, 2, 1):
        (tree,) = source.draft([wanted(session, 60)])
        assert tree is not None and max(depths(tree)) == expected
        # Nobody guessed it: it is none of the ten likeliest.
        free = set(range(VOCAB)) - set(tree.tokens)
        commit(session, [min(free)])


def test_chains_are_drawn_for_rejection(tiny_model: Path, draft: Path) -> None:
    source = source_of(tiny_model, draft, length=LEVELS)
    session = opened(source, PROMPT, temperature=0.8, sampled=True)
    (tree,) = source.draft([wanted(session, 40)])
    assert tree is not None and len(tree) == LEVELS == len(tree.proposals)
    logs = levels(draft, PROMPT, 0.8)
    for level, proposal in enumerate(tree.proposals):
        q = np.exp([float(logs[level, token]) for token in proposal.token_ids])
        assert np.allclose(proposal.probabilities, q / q.sum(), rtol=1e-3)


def test_the_seed_of_the_targets_noise_orders_each_level(tiny_model: Path, draft: Path) -> None:
    from speculation.messages import DraftNoise

    source = source_of(tiny_model, draft, length=LEVELS)
    session = opened(source, PROMPT, temperature=0.8, noise=DraftNoise(seed=3, top_k=0, top_p=1.0, min_p=0.0))
    (tree,) = source.draft([wanted(session, 20)])
    assert tree is not None and len(tree) == 20
    assert not is_product(tree, levels(draft, PROMPT, 0.8))


@pytest.mark.parametrize("token", [VOCAB, -1, "x", True])
def test_a_mask_outside_the_vocabulary_is_refused(tiny_model: Path, tmp_path: Path, token: object) -> None:
    folder = make_parallel_draft(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": token}))
    with refuses(ConfigurationError, field="pard_token"):
        inspect(folder, tiny_model)
    with refuses(ConfigurationError, field="pard_token"):
        source_of(tiny_model, folder)


@pytest.mark.parametrize("policy", ["confidence", "entropy", "disco"])
def test_policies_that_stop_within_a_pass_are_refused(tiny_model: Path, draft: Path, policy: str) -> None:
    with refuses(ConfigurationError, field="drafter.stop_policy", value=policy):
        source_of(tiny_model, draft, stop=StopConfig(policy=policy))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"pard2": True}, {"spd_type": "pard2"}, {"pard2_target_layers": [3]}], ids=str)
def test_pard_2_is_named(tiny_model: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    folder = make_parallel_draft(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with refuses(ConfigurationError, says="is a PARD-2 checkpoint"):
        inspect(folder, tiny_model)
