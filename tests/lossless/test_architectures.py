"""Every type of causal language model that the installed transformers knows: served as ``generate`` answers, or refused by
a sentence. There is no third outcome, for new types in a new transformers either."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.verifier.native.library import library
from tests.lossless.architectures import NOT_MADE, TYPES, outcome, row

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()

# What is still wrong, and how it shows. Whatever is mended must leave this table.
KNOWN: dict[str, str] = {
    "bart": "other tokens than transformers",
    "bigbird_pegasus": "other tokens than transformers",
    "blenderbot": "other tokens than transformers",
    "blenderbot-small": "other tokens than transformers",
    "blt": "at its load",
    "diffllama": "other tokens than transformers",
    "doge": "other tokens than transformers",
    "emu3": "ValueError at its load",
    "falcon": "KeyError at its load",
    "gemma3n": "ImportError at its load",
    "gemma3n_text": "ValueError at its load",
    "gemma4": "AmbiguousGlobalPerLayerAttributeError at its load",
    "gemma4_assistant": "at its load",
    "gemma4_text": "AmbiguousGlobalPerLayerAttributeError at its load",
    "gemma4_unified": "AmbiguousGlobalPerLayerAttributeError at its load",
    "gemma4_unified_assistant": "at its load",
    "gemma4_unified_text": "AmbiguousGlobalPerLayerAttributeError at its load",
    "git": "KeyError at its load",
    "gpt_neo": "KeyError at its load",
    "gptj": "KeyError at its load",
    "marian": "other tokens than transformers",
    "mbart": "other tokens than transformers",
    "mllama": "ValueError at its load",
    "moshi": "other tokens than transformers",
    "musicgen": "ValueError at its load",
    "musicgen_melody": "ValueError at its load",
    "nanochat": "two stages compute something else",
    "pegasus": "other tokens than transformers",
    "phimoe": "other tokens than transformers",
    "plbart": "other tokens than transformers",
    "qwen2_moe": "other tokens than transformers",
    "rwkv": "at its load",
    "whisper": "other tokens than transformers",
    "xlstm": "at its load",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TYPES)
async def test_served_as_generate_answers_or_refused(model_type: str, tmp_path: Path) -> None:
    found = await outcome(model_type, tmp_path)
    if model_type in KNOWN:
        assert KNOWN[model_type] in found.wrong
        return
    assert not found.wrong
    if library() is not None:
        assert row(model_type, found) in PAGE.splitlines(), "docs/models.md is out of date"
    if found.refusal:
        assert "\n" not in found.refusal and len(found.refusal) < 600


def test_tables_name_types_that_there_are() -> None:
    assert KNOWN.keys() | NOT_MADE.keys() <= set(TYPES)


def test_the_page_knows_every_type() -> None:
    """``python -m tests.lossless.architectures > docs/models.md`` makes it."""
    named = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")]
    assert named[1:] == list(TYPES)
