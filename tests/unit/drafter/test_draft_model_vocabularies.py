"""Draft models with other tokens than their target: listed ones alone, or another tokeniser's."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from services.drafter.draft_model.vocabulary_map import map_vocabularies
from tests.drafters.draft_model_sessions import PROMPT, VOCAB, Target, commit, opened, refused, source_of, wanted
from tests.tiny_models.tiny import make_tiny_model


def test_only_listed_tokens_are_drafted(tiny_model: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_model, tmp_path / "draft"))
    kept = torch.tensor([token for token in range(VOCAB) if token % 3 == 1 and token < 300])
    save_file(
        {"d2t": kept - torch.arange(len(kept)), "t2d": torch.zeros(VOCAB, dtype=torch.bool)},
        draft / "vocabulary.safetensors",
    )
    source = source_of(tiny_model, draft)
    (tree,) = source.draft([wanted(opened(source, PROMPT), 12)])
    assert len(tree) == 12 and all(token % 3 == 1 for token in tree.tokens)
    q = torch.softmax(Target(tiny_model).logits(PROMPT)[-1][kept], -1)
    assert tree.tokens[0] == int(kept[q.argmax()]) and max(tree.scores) == pytest.approx(float(q.max()), rel=1e-4)


def write_words(folder: Path, words: Sequence[str], special: str = "<|end|>") -> None:
    """A word-level tokeniser, sentencepiece's way of marking spaces."""
    vocab = {word: index for index, word in enumerate([special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=special))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([special])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, Path]:
    """A target on words and a draft model with some of them, at other ids, and others."""
    shared = [f"▁w{n}" for n in range(30)]
    folders = []
    for name, words in (
        ("target", [*shared, "▁only", *(f"▁t{n}" for n in range(8))]),
        ("draft", [*(f"▁d{n}" for n in range(9)), *reversed(shared), "▁", "▁on", "ly"]),
    ):
        folder = make_tiny_model(tmp_path / name, vocab_size=len(words) + 1, eos_token_id=0)
        write_words(folder, words)
        folders.append(folder)
    return folders[0], folders[1]


def test_equal_tokens_of_two_tokenisers_stand_for_each_other(foreign: tuple[Path, Path]) -> None:
    target, draft = foreign
    found = map_vocabularies(draft, target)
    assert found.kept is not None and found.targets is not None
    assert len(found.kept) == 31
    own, wanted_ids = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (draft, target))
    for each, token in zip(found.kept.tolist(), found.targets.tolist(), strict=True):
        assert own.id_to_token(each) == wanted_ids.id_to_token(token)
        assert found.encode([token]) == [each]
    # A word of the target alone is left to the draft model's own spelling.
    assert all(each < 43 for each in found.encode([31]))


def test_a_draft_model_with_another_tokeniser_drafts_the_targets_tokens(foreign: tuple[Path, Path]) -> None:
    target, draft = foreign
    source = source_of(target, draft)
    found = map_vocabularies(draft, target)
    assert found.targets is not None and found.kept is not None
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()
    session = opened(source, [3, 4, 5, 31, 6])
    for _ in range(12):
        (tree,) = source.draft([wanted(session, 6)])
        with torch.inference_mode():
            row = model(torch.tensor([found.encode(session.tokens)])).logits[0, -1][found.kept]
        assert tree.tokens[0] == found.targets[int(row.argmax())]
        assert set(tree.tokens) <= set(found.targets.tolist())
        assert max(tree.scores) == pytest.approx(float(torch.softmax(row, -1).max()), rel=1e-3)
        commit(session, [*tree.tokens[:1], 33])


def test_a_tokeniser_on_bytes_and_one_on_characters_share_tokens(tiny_model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "d", vocab_size=9)
    write_words(draft, ["▁t", "a", "ö", "▁", "<0xE2>", "the", "zzzz"])
    found = map_vocabularies(draft, tiny_model)
    assert found.kept is not None and found.targets is not None
    target = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    pairs = dict(zip(found.kept.tolist(), found.targets.tolist(), strict=True))
    assert target.decode([pairs[2]]) == "a" and target.decode([pairs[4]]) == " "
    assert target.id_to_token(pairs[5]) == "â"
    assert target.id_to_token(pairs[0]) == "<|end|>"
    assert 7 not in pairs


def test_vocabularies_without_a_common_token_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "d", vocab_size=4)
    write_words(draft, ["▁xyzzy", "▁plugh", "▁plover"], special="<none>")
    assert "no token in common" in refused(tiny_model, draft)


def test_a_stored_vocabulary_must_fit(tiny_model: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(tiny_model, tmp_path / "draft"))
    for ids in ([5, 4], [0, VOCAB]):
        offsets = torch.tensor(ids) - torch.arange(len(ids))
        save_file({"d2t": offsets}, draft / "vocabulary.safetensors")
        assert "d2t" in refused(tiny_model, draft)
