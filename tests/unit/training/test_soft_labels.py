"""Soft labels of DISCO's classifier: the chance that speculative sampling accepts a token drawn from q."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.drafter.draft_model.source import DraftModelSource
from services.drafter.draft_model.vocabulary_map import VocabularyMap
from speculation import rejection
from speculation.acceptance import StopRule
from speculation.errors import ConfigurationError
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, source_of
from tests.lossless.enumeration import Oracle, Output, draft, outcomes, sampled_tree, target, trials
from tests.running.refusals import refuses
from tests.tiny_models.draft_models import make_tiny_draft
from training.make_disco import check_labels
from training.soft_labels import SoftLabels, acceptance_chances
from training.stop_examples import ProbedAnswer, ProbedChain, chain_examples, judged_examples

ANSWER = (40, 7, 300, 12, 12, 5)


@pytest.mark.parametrize("prefix", [(), (1,), (3, 0)])
@pytest.mark.parametrize("kept", [None, (0, 2, 3)])
def test_they_are_the_rules_own_chances(prefix: tuple[int, ...], kept: tuple[int, ...] | None) -> None:
    """Against every draw from q and every coin of the rule, the real one."""
    ids = list(kept or range(4))
    q = np.zeros(4)
    q[ids] = draft(prefix)[ids] / draft(prefix)[ids].sum()

    def accepted(oracle: Oracle) -> Output:
        tree = sampled_tree(oracle, lambda _: q, 1, 1, True)
        none_ends = StopRule(stop_token_ids=frozenset(), generated=0, room=9)
        return (len(rejection.accept(tree, trials(tree, lambda _: target(prefix), oracle), 0, none_ends).path),)

    logits = [torch.from_numpy(np.log(each)).float()[None] * 0.7 for each in (target(prefix), q[ids])]
    soft = acceptance_chances(logits[0], logits[1], None if kept is None else torch.tensor(ids), 0.7)
    assert float(soft) == pytest.approx(outcomes(accepted)[(1,)], abs=1e-6)
    assert float(soft) < 0.99


def labelled(target_folder: Path, source: DraftModelSource, shift: int = 0) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    text = torch.tensor([[*PROMPT, *ANSWER]])
    with torch.inference_mode():
        states = model(text, output_hidden_states=True).hidden_states[-1][0]
    first = len(PROMPT) - 1 + shift
    return SoftLabels(source, model.get_output_embeddings().weight.detach(), 0.8).along(
        tuple(PROMPT), ANSWER, states[first : first + len(ANSWER)].numpy()
    )


def test_along_an_answer_each_place_has_its_own(tiny_model: Path, tmp_path: Path) -> None:
    other = make_tiny_draft(tiny_model, tmp_path / "draft", disturbed=0.3)
    found = labelled(tiny_model, source_of(tiny_model, other))
    text = torch.tensor([[*PROMPT, *ANSWER]])
    p, q = (
        (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32)(text).logits[0, len(PROMPT) - 1 : -1] / 0.8
        ).softmax(-1)
        for each in (tiny_model, other)
    )
    assert found == pytest.approx((1 - 0.5 * (p - q).abs().sum(-1)).detach().numpy(), abs=1e-4)
    # The target itself is always accepted; were states a position off, it would not be.
    assert labelled(tiny_model, source_of(tiny_model)) == pytest.approx(np.ones(len(ANSWER)), abs=1e-4)
    assert labelled(tiny_model, source_of(tiny_model), shift=-1).mean() < 0.9


def test_examples_take_them_up_to_the_first_wrong_token() -> None:
    features = np.zeros((5, 13), np.float32)
    chain = partial(ProbedChain, features=features)
    soft = np.linspace(0.1, 0.8, 8, dtype=np.float32)
    answer = ProbedAnswer(length=8, soft=soft, chains=[chain(position=1, right=2), chain(position=4, right=4)])
    # Nothing is wrong in the second chain: the answer ends.
    assert judged_examples([answer]).labels.tolist() == [*soft[1:4].tolist(), *soft[4:8].tolist(), 0]
    assert chain_examples([answer]).labels.tolist() == [*soft[1:4].tolist(), 0, 0, *soft[4:8].tolist(), 0]


def test_what_has_no_soft_labels_is_refused(tiny_model: Path) -> None:
    with refuses(ConfigurationError, field="--labels", value="soft at --temperature 0", allowed="above 0; or use hard"):
        check_labels("soft", 0.0)
    check_labels("hard", 0.0)
    source = source_of(tiny_model)
    source._vocabulary = VocabularyMap(draft_size=VOCAB, _ids={})
    with refuses(ConfigurationError, field="the draft model"):
        source.logits_behind(PROMPT, 2)
