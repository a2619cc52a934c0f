"""The draft model: what it drafts equals what plain passes of it give, whatever was rolled back, batched or cut off before."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from speculation.tree import ROOT, validate
from speculation.types import TokenTree
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, Target, chain_of, commit, opened, same, source_of, wanted
from tests.tiny_models.draft_models import draft_beside


@pytest.mark.examples(3)
@pytest.mark.parametrize("branches", [1, None, 3])
def test_rolled_back_is_as_good_as_new(tiny_model: Path, branches: int | None) -> None:
    """Whatever path of a tree is accepted: a new session drafts the same."""
    source, other = source_of(tiny_model, eagle_topk=branches), source_of(tiny_model, eagle_topk=branches)
    chance = random.Random(3)
    session, paths = opened(source, PROMPT), set()
    for _ in range(40):
        (tree,) = source.draft([wanted(session, 16)])
        (new,) = other.draft([wanted(opened(other, session.tokens, len(PROMPT)), 16)])
        assert same(tree, new)
        node, path = chance.randrange(-1, len(tree)), []
        while node != ROOT:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        paths.add(len(path))
        bonus = [chance.randrange(VOCAB)] if chance.random() < 0.7 or not path else []
        commit(session, [*reversed(path), *bonus])
    assert len(paths) >= 4


def test_a_batch_is_what_each_one_gets_alone(tiny_model: Path) -> None:
    draft = draft_beside(tiny_model)
    together, alone = source_of(tiny_model, draft), source_of(tiny_model, draft)
    prompts = [PROMPT[:length] for length in (1, 4, 11)] + [[40, 41, 42] * 30, [100 + i for i in range(64)]]
    one, two = ([opened(source, prompt) for prompt in prompts] for source in (together, alone))
    for step in range(6):
        trees = together.draft([wanted(session, 10) for session in one])
        for tree, session in zip(trees, two, strict=True):
            (own,) = alone.draft([wanted(session, 10)])
            assert same(tree, own)
        for index, (left, right) in enumerate(zip(one, two, strict=True)):
            # Some sessions are behind others by a step.
            if (step + index) % 3:
                said = [*chain_of(trees[index])[: (step + index) % 5], 17]
                commit(left, said)
                commit(right, said)


def test_long_texts_are_read_in_parts_while_others_draft(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    longer = [3 + i % 300 for i in range(450)]
    slow, quick = opened(source, longer), opened(source, PROMPT)
    calls = 0
    while True:
        late, early = source.draft([wanted(slow), wanted(quick)])
        assert len(early) == 8
        calls += 1
        if late is not None:
            break
    assert calls == 2
    (alone,) = source.draft([wanted(opened(source, longer))])
    assert same(late, alone)


@pytest.mark.parametrize("window", [64, 2048])
def test_a_text_longer_than_the_window_is_drafted_for_from_its_end(tiny_model: Path, window: int) -> None:
    """2048 is more than the model's 512 positions, which then are the limit."""
    source = source_of(tiny_model, window=window)
    longest = min(window, 512)
    target = Target(tiny_model)
    session = opened(source, [3 + i % 300 for i in range(longest + 40)])
    for _ in range(20):
        (tree,) = source.draft([wanted(session, 4)])
        assert 0 < len(tree) <= 4
        assert longest // 2 - 4 <= session.cache.text and len(session.cache) <= longest
        # Exactly what the model says of the end of the text that the cache holds.
        assert tree.tokens[0] == target.choices(session.tokens[-session.cache.text :])[-1]
        commit(session, [tree.tokens[0], 17])


def test_unlikely_nodes_are_not_drafted(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    (whole,) = source.draft([wanted(session, 20)])
    assert list(whole.scores) != sorted(whole.scores)
    # A later pass over the same tokens may differ in the last digits.
    least = 0.9999 * sorted(whole.scores)[len(whole) // 2]
    (part,) = source.draft([wanted(session, 20, least)])
    kept = [node for node in range(len(whole)) if whole.scores[node] >= least]
    assert [part.tokens[node] for node in range(len(part))] == [whole.tokens[node] for node in kept]
    assert source.draft([wanted(session, 20, 1.0)]) == [TokenTree()]


def test_the_likeliest_nodes_fill_a_tree(tiny_model: Path) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    (large,), (small,) = source.draft([wanted(session, 16)]), source.draft([wanted(session, 5)])
    validate(large, vocab_size=VOCAB, max_nodes=16)
    assert sorted(small.scores) == pytest.approx(sorted(large.scores)[-5:], rel=1e-4)


def test_memory_is_bounded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tiny_model)
    sessions = [opened(source, PROMPT) for _ in range(5)]
    (first,) = source.draft([wanted(sessions[0])])
    monkeypatch.setattr(source._room, "most_bytes", 3 * sessions[0].cache.nbytes)
    for session in sessions:
        assert same(source.draft([wanted(session)])[0], first)
    assert [bool(session.cache.nbytes) for session in sessions] == [False, False, True, True, True]
    # What was forgotten is computed once more.
    assert same(source.draft([wanted(sessions[0])])[0], first)
    sessions[0].close()
    assert not sessions[0].cache.nbytes


def test_after_a_pass_that_failed_drafts_are_right_again(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tiny_model)
    session = opened(source, PROMPT)
    (tree,) = source.draft([wanted(session)])
    commit(session, chain_of(tree)[:2])
    own, calls = source._lm.logits, 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("planted failure")
        return own(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(source._lm, "logits", failing)
        with pytest.raises(RuntimeError, match="planted"):
            source.draft([wanted(session)])
    (again,) = source.draft([wanted(session)])
    (fresh,) = source.draft([wanted(opened(source, session.tokens, len(PROMPT)))])
    assert same(again, fresh)


def test_sliding_windows_are_the_models_own(tiny_model: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB,
            num_key_value_heads=2,
            sliding_window=16,
            max_position_embeddings=256,
            initializer_range=0.4,
            **sizes,
        )
    )
    shutil.copytree(tiny_model, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "m")
    source = source_of(tiny_model, tmp_path / "m", eagle_topk=1)
    session, drafted = opened(source, PROMPT * 5), []
    for _ in range(12):
        (tree,) = source.draft([wanted(session, 4)])
        drafted.append((len(session.tokens), chain_of(tree)))
        commit(session, [*chain_of(tree)[:2], 17])
    choices = Target(tmp_path / "m").choices(session.tokens)
    for start, chain in drafted:
        assert chain[:2] == choices[start - 1 : start + 1]


def test_half_precision_drafts(tiny_model: Path) -> None:
    source = source_of(tiny_model, dtype="bfloat16")
    session = opened(source, PROMPT)
    for _ in range(30):
        (tree,) = source.draft([wanted(session, 4)])
        commit(session, tree.tokens[:1])
    choices = Target(tiny_model).choices(session.tokens)
    assert (
        sum(left == right for left, right in zip(choices[len(PROMPT) - 1 :], session.tokens[len(PROMPT) :], strict=False))
        > 20
    )
