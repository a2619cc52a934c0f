"""Gemma 4 with its assistant: the tokens of plain decoding, greedily and sampled, wherever the assistant runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.sources.interfaces import DraftWanted
from speculation.types import TokenTree
from tests.lossless.test_structured import LETTERS
from tests.lossless.test_where_models_draft import SAMPLING, answers, compare
from tests.running.patience import PATIENCE_S
from tests.servers.service import pipeline
from tests.tiny_models.assistants import make_pair


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    ("target", "place"), [("shared", "drafter"), ("one matrix", "verifier"), ("experts", "drafter")], ids=str
)
async def test_no_token_changes(tmp_path: Path, target: str, place: str) -> None:
    pair = make_pair(tmp_path, target, ordered=target == "shared")
    async with pipeline(pair.target, "drafter.models=[]") as running:
        plain = [await answers(running, "autoregressive", sampling) for sampling in SAMPLING]
    named = [f"drafter.models=[{pair.folder}]", f"drafter.models_in={place}", "verifier.draft_deadline_s=10"]
    async with pipeline(pair.target, *named) as running:
        for strategy in ("mtp", "blend"):
            for sampling, expected in zip(SAMPLING, plain, strict=True):
                await compare(running, strategy, "mtp", sampling, expected)
        assert not running.verifier.loop.stats.drafts_malformed


@pytest.mark.exhaustive
async def test_it_is_accepted_in_answers_of_a_form(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, ordered=True)
    letters = {"temperature": 0.8, "seed": 7, "ignore_eos": False, "structured_outputs": LETTERS}
    async with pipeline(pair.target, f"drafter.models=[{pair.folder}]", "verifier.draft_deadline_s=10") as running:
        plain, taken = await answers(running, "autoregressive", letters), running.verifier.loop.stats.accepted_by_source
        async with asyncio.timeout(PATIENCE_S):
            while not taken.get("mtp"):
                assert await answers(running, "mtp", letters) == plain


async def test_what_is_drafted_is_what_transformers_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the states that really travel: of every layer, of prompts and answers."""
    pair = make_pair(tmp_path, whole=True, ordered=True)
    drafted: list[tuple[tuple[int, ...], int]] = []
    plain = FeatureSource.draft

    def draft(self: FeatureSource, batch: Sequence[DraftWanted]) -> list[TokenTree | None]:
        texts = [tuple(wanted.session.tokens) for wanted in batch]
        trees = plain(self, batch)
        drafted.extend(
            (tokens, tree.tokens[0]) for tokens, tree in zip(texts, trees, strict=True) if tree is not None and tree
        )
        return trees

    monkeypatch.setattr(FeatureSource, "draft", draft)
    async with pipeline(pair.target, f"drafter.models=[{pair.folder}]", "verifier.draft_deadline_s=10") as running:
        await answers(running, "mtp", {})
    some = drafted[:: max(1, len(drafted) // 40)]
    agreed = [int(pair.along(tokens, ())[0].argmax()) == token for tokens, token in some]
    # States travel as float16.
    assert len(agreed) >= 40 and sum(agreed) >= 0.95 * len(agreed)
