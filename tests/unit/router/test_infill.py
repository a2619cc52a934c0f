"""Prompts that have a gap filled: by the names of the tokens that a model was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from services.api.messages import Infill
from services.router.infill import infill_tokens
from services.router.tokenizer_file import tokenizer_info
from services.router.tokens import Tokens
from speculation.errors import InvalidArgument
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def with_tokens(folder: Path, names: tuple[str, ...], *, special: bool = False) -> Tokens:
    make_tiny_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name in names], special_tokens=special)
    tokenizer.save_pretrained(folder)
    return Tokens(str(folder))


def spelt(tokens: Tokens, ids: tuple[int, ...]) -> str:
    return "".join(token.data.decode() for token in tokens.spell(ids))


@pytest.mark.parametrize("special", [True, False])
def test_a_gap_in_qwens_form(tmp_path: Path, special: bool) -> None:
    tokens = with_tokens(tmp_path, QWEN, special=special)
    plain = tokens.encode_infill("the quick", Infill(suffix=" fox"))
    assert spelt(tokens, plain) == "<|fim_prefix|>the quick<|fim_suffix|> fox<|fim_middle|>"
    # As anybody would write it by hand.
    assert plain == tokens.encode("<|fim_prefix|>the quick<|fim_suffix|> fox<|fim_middle|>")
    files = tokens.encode_infill("", Infill(suffix="", files=(("a.py", "over"), ("b.py", "dog"))))
    assert spelt(tokens, files) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nover<|file_sep|>b.py\ndog<|file_sep|>filename\n"
        "<|fim_prefix|><|fim_suffix|><|fim_middle|>"
    )
    assert tokens.infill is not None
    assert spelt(tokens, tokens.infill.ends) == "<|fim_pad|><|repo_name|><|file_sep|>"


def test_without_a_token_for_files_they_are_snippets(tmp_path: Path) -> None:
    tokens = with_tokens(tmp_path, DEEPSEEK)
    ids = tokens.encode_infill("the", Infill(suffix=" fox", files=(("a.py", "over"),)))
    assert spelt(tokens, ids) == "\n\n--- snippet ---\n\nover<｜fim▁begin｜>the<｜fim▁hole｜> fox<｜fim▁end｜>"


def test_codellamas_texts_have_no_space_put_before_them(tmp_path: Path) -> None:
    """As its own ``encode_infilling`` has it; and its prompt begins with the token that all its texts begin with."""
    letters = {letter: 10 + number for number, letter in enumerate("▁abcxyz")}
    named = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁<PRE>": 3, "▁<SUF>": 4, "▁<MID>": 5, "▁<EOT>": 6}
    tokenizer = Tokenizer(models.BPE(vocab={**named, **letters}, merges=[], unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    tokens = Tokens(str(tmp_path))
    space, a, b, x = (letters[each] for each in "▁abx")
    assert tokens.encode("ab") == (1, space, a, b)
    assert tokens.encode_infill("a b", Infill(suffix="x")) == (1, 3, a, space, b, 4, x, 5)
    assert tokens.infill is not None and tokens.infill.ends == (6,)


def test_a_model_without_the_tokens_refuses(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    tokens = Tokens(str(tmp_path))
    assert tokens.infill is None
    with refuses(InvalidArgument, "suffix", "set", allowed="no fill-in-the-middle tokens"):
        tokens.encode_infill("a", Infill(suffix="b"))
    # All three of one family are needed.
    assert infill_tokens({"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<fim_middle>": 3}.get) is None


def test_what_is_told_of_a_tokenizer(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "name_or_path": "/somewhere"}))
    found = tokenizer_info(tmp_path)
    assert found["eos_token"] == "<|end|>" and "raise_exception" in found["chat_template"]
    assert found["tokenizer_class"] == settings["tokenizer_class"] and "name_or_path" not in found
