"""Every type of causal language model that the installed transformers knows: served as ``generate`` answers, or refused by
a sentence. There is no third outcome, for new types in a new transformers either."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from services.verifier.kernels.native.library import library
from tests.lossless.architectures import ANSWER, TYPES, outcome
from tests.lossless.models_page import NOT_MADE, WELL_KNOWN, page, row

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()

# What is still wrong, and how it shows. Whatever is mended must leave this table.
KNOWN: dict[str, str] = {}


@pytest.mark.exhaustive
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
    assert KNOWN.keys() | NOT_MADE.keys() | {kind for _, kind in WELL_KNOWN} <= set(TYPES)


def test_the_page_knows_every_type() -> None:
    """``python -m tests.lossless.architectures > docs/models.md`` makes it."""
    rows = [line for line in PAGE.partition("| type |")[2].splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in rows] == list(TYPES)
    assert page(rows, transformers.__version__, ANSWER) == PAGE.rstrip("\n")
    assert "-1 tokens" not in PAGE and "model.safetensors" not in PAGE, "a reason about the test, not about the model"
