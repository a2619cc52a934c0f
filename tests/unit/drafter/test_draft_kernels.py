"""A draft model over the target's kernels drafts what it drafts over torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from cluster.models.draft_kernels import KernelLM
from cluster.models.drafters import by_kernels
from services.drafter.draft_model.language_model import LanguageModel
from services.drafter.draft_model.source import DraftModelSource
from services.model_files.weights.stored_blocks import StoredLinear, quantized
from services.verifier.attention.calls import Call
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.loading.cut_output import cut_output
from services.verifier.model.side_model import SideModel
from speculation.errors import ConfigurationError
from speculation.tree import ROOT
from speculation.types import TokenTree
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, commit, opened, same, source_of, wanted
from tests.kernels.kernels_here import needs_kernels
from tests.running.refusals import refuses
from tests.tiny_models.draft_models import draft_beside, make_tiny_draft
from tests.tiny_models.tiny import make_tiny_model

pytestmark = needs_kernels


def by_both(target: Path, draft: Path | None = None, **trained: object) -> tuple[DraftModelSource, DraftModelSource]:
    """A source over the kernels, and one over torch."""
    used: list[LanguageModel] = []

    def make(folder: Path, target: Path, kept: Sequence[int] | None) -> LanguageModel:
        used.append(by_kernels(folder, target, kept))
        return used[-1]

    both = source_of(target, draft, draft_kernels=make, **trained), source_of(target, draft, **trained)
    assert isinstance(used[0], KernelLM)
    return both


def accepted(chance: random.Random, tree: TokenTree) -> list[int]:
    """A random path of the tree, and often a token behind it."""
    node, path = chance.randrange(-1, len(tree)), list[int]()
    while node != ROOT:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1] + ([chance.randrange(VOCAB)] if chance.random() < 0.7 or not path else [])


def differs(target: Path, branches: int | None) -> bool:
    """Whether the two ever draft differently while random paths of their trees are accepted."""
    chance = random.Random(3)
    both = by_both(target, draft_beside(target), eagle_topk=branches)
    one, other = (opened(source, PROMPT) for source in both)
    for _ in range(30):
        (left,), (right,) = both[0].draft([wanted(one, 16)]), both[1].draft([wanted(other, 16)])
        assert left is not None and right is not None
        if not same(left, right):
            return True
        said = accepted(chance, right)
        commit(one, said)
        commit(other, said)
    return False


@pytest.mark.examples(3)
@pytest.mark.parametrize("branches", [1, None, 3])
def test_whatever_is_accepted_they_draft_alike(tiny_model: Path, branches: int | None) -> None:
    assert not differs(tiny_model, branches)


def test_rows_that_are_not_moved_are_noticed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SideModel, "move", lambda *_: None)
    assert differs(tiny_model, 3)


def test_a_batch_whose_texts_outgrow_the_pool(tiny_model: Path) -> None:
    """Sessions of very different lengths, some behind others, one cleared under way."""
    both = by_both(tiny_model, draft_beside(tiny_model))
    prompts = [
        PROMPT,
        [3 + i % 300 for i in range(450)],
        [5 + i % 200 for i in range(400)],
        [9 + i % 77 for i in range(430)],
    ]
    one, other = ([opened(source, prompt) for prompt in prompts] for source in both)
    compared = 0
    for step in range(8):
        trees = [
            both[0].draft([wanted(session, 10) for session in one]),
            both[1].draft([wanted(each, 10) for each in other]),
        ]
        for index, (left, right) in enumerate(zip(*trees, strict=True)):
            assert (left is None) == (right is None)
            if left is not None and right is not None:
                assert same(left, right)
                compared += 1
            if (step + index) % 3:
                commit(one[index], [17, 18 + step])
                commit(other[index], [17, 18 + step])
        if step == 4:
            one[2].cache.clear()
            other[2].cache.clear()
    assert compared > 16
    assert all(session.cache.nbytes > 0 for session in one)
    for session in one:
        session.close()
    assert not any(session.cache.nbytes for session in one)


def test_a_cut_output_layer(tiny_model: Path, tmp_path: Path) -> None:
    draft = make_tiny_draft(tiny_model, tmp_path / "draft")
    ids = np.arange(0, VOCAB, 3)
    save_file({"d2t": ids - np.arange(len(ids))}, draft / "vocabulary.safetensors")
    both = by_both(tiny_model, draft)
    (left,), (right,) = (source.draft([wanted(opened(source, PROMPT), 16)]) for source in both)
    assert left is not None and right is not None and same(left, right)
    assert all(token % 3 == 0 for token in left.tokens)


def test_what_they_do_not_compute_torch_does(tmp_path: Path, tiny_model: Path) -> None:
    """Heads of eight numbers are no whole vectors."""
    draft = make_tiny_model(tmp_path / "eights", num_attention_heads=8, num_key_value_heads=8)
    with refuses(ConfigurationError, says="native kernel"):
        by_kernels(draft, tiny_model, None)
    asked, plain = source_of(tiny_model, draft, draft_kernels=by_kernels), source_of(tiny_model, draft)
    (left,), (right,) = (source.draft([wanted(opened(source, PROMPT), 8)]) for source in (asked, plain))
    assert left is not None and right is not None and same(left, right)


@pytest.mark.parametrize("stored", [False, True])
def test_rows_of_the_output_layer(tiny_model: Path, stored: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    if stored:
        model.set_output_embeddings(StoredLinear(quantized(model.get_output_embeddings().weight), None))
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        whole = model(ids).logits
        cut_output(model, [3, 5, 200])
        torch.testing.assert_close(model(ids).logits, whole[..., [3, 5, 200]], atol=1e-5, rtol=1e-5)
    model.set_output_embeddings(nn.Sequential())
    with refuses(ConfigurationError, field="the output layer"):
        cut_output(model, [0])


def test_a_pool_that_grows_keeps_what_it_holds() -> None:
    calls = [
        Call(entry=entry, heads=2, kv_heads=heads, key_size=16, value_size=16, scale=1.0)
        for entry, heads in ((0, 2), (1, 1))
    ]
    pool = KVPool(calls, rows=2 * BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    for each in (*pool.keys, *pool.values):
        each[:2, ..., :16] = torch.randn_like(each[:2, ..., :16])
    before = [each[:2].clone() for each in (*pool.keys, *pool.values)]
    pool.grow(7)
    assert pool.total_blocks == pool.padding_block == 7
    assert all(len(each) == 8 for each in (*pool.keys, *pool.values))
    assert all(torch.equal(now[:2], held) for now, held in zip((*pool.keys, *pool.values), before, strict=True))
    assert all(bool((values[..., 16] == 1).all()) for values in pool.values)
