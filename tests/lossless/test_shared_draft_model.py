"""A draft model that shares its target's layers: the tokens of plain decoding, over the target's kernels and over torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lossless.test_where_models_draft import SAMPLING, answers, compare
from tests.servers.service import pipeline
from tests.tiny_models.draft_models import make_sharing_draft
from tests.tiny_models.tiny import make_tiny_model


@pytest.mark.examples(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["kernels", "torch"])
async def test_the_tokens_of_plain_decoding(tmp_path: Path, dtype: str) -> None:
    target = make_tiny_model(tmp_path / "target")
    _, own = make_sharing_draft(target, tmp_path)
    named = [f"drafter.models=[{own}]", f"drafter.dtype={dtype}", "verifier.draft_deadline_s=10"]
    async with pipeline(target, *named) as running:
        for sampling in SAMPLING:
            plain = await answers(running, "autoregressive", sampling)
            for strategy in ("draft_model", "blend"):
                await compare(running, strategy, "draft_model", sampling, plain)
        assert not running.verifier.loop.stats.drafts_malformed
