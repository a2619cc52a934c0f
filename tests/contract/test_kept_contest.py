"""What a verifier's steps have shown of drafting is known to the next one on the same machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.in_process import InProcessDraftLink
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.service import VerifierService
from speculation.sources import STRATEGIES
from speculation.types import Plan
from tests.engine.fakes import collect, origin, request

BLEND = Plan(strategy="blend", sources=STRATEGIES["blend"], max_nodes=12, observe_top_k=6)


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> VerifierConfig:
    target = TargetConfig(model_path=str(tiny_model), kv_cache_tokens=4096, threads=1, kernels_dir=tmp_path / "kernels")
    return VerifierConfig(model_name="tiny", target=target, costs_dir=tmp_path / "costs")


async def answered(config: VerifierConfig, requests: int = 6) -> tuple[bool, list[list[int]]]:
    """Whether a verifier drafted from the beginning, and what it answered before it was stopped."""
    verifier = VerifierService(config, [origin(InProcessDraftLink(DrafterService(DrafterConfig())))])
    drafts = not verifier.loop._drafting.quiet
    await verifier.start()
    try:
        prompts = [[5, 6, 7, 8, number] * 6 for number in range(requests)]
        asked = [request(f"r{number}", each, BLEND, max_tokens=48, ignore_eos=True) for number, each in enumerate(prompts)]
        found = await asyncio.gather(*(collect(verifier.loop, one) for one in asked))
    finally:
        await verifier.stop()
    return drafts, [tokens for tokens, *_ in found]


def kept_files(config: VerifierConfig) -> Iterator[Path]:
    assert config.costs_dir is not None
    return (file for file in config.costs_dir.glob("*.json") if "contest" in json.loads(file.read_text())["about"])


async def test_the_next_verifier_begins_with_what_is_known(config: VerifierConfig) -> None:
    first = await answered(config)
    assert first[0]
    (file,) = kept_files(config)
    content = json.loads(file.read_text())
    assert content["measured"]["rates"]
    for drafting in (False, True):
        file.write_text(json.dumps(content | {"measured": content["measured"] | {"drafting": drafting}}))
        assert await answered(config) == (drafting, first[1])


@pytest.mark.examples(3)
@pytest.mark.parametrize("damaged", ["", "[", '{"about": 1}', "half", "other machine"])
async def test_a_damaged_file_is_replaced(config: VerifierConfig, damaged: str) -> None:
    first = await answered(config)
    (file,) = kept_files(config)
    content = json.loads(file.read_text())
    if damaged == "half":
        content["measured"] = {"drafting": False}
    elif damaged == "other machine":
        content["about"]["threads"] += 63
        content["measured"]["drafting"] = False
    file.write_text(json.dumps(content) if damaged in ("half", "other machine") else damaged)
    assert await answered(config) == first
    assert json.loads(file.read_text())["measured"]["rates"]
    assert json.loads(file.read_text())["about"]["threads"] == config.target.threads


async def test_nothing_is_kept_where_it_is_switched_off(config: VerifierConfig) -> None:
    await answered(replace(config, keep_learnt=False))
    assert not list(kept_files(config))


async def test_nothing_is_kept_of_a_verifier_that_decoded_nothing(config: VerifierConfig) -> None:
    await answered(config, requests=0)
    assert not list(kept_files(config))
