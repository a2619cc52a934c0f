"""Answers that Uno drafts for: no token changes, and passes are as few as drafts are good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.service import DrafterService
from services.verifier.config import TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.service import VerifierService
from speculation.types import Plan
from tests.drafters.draft_links import linked
from tests.engine.fakes import PLAIN, collect, origin, request
from tests.engine.stage_forks import launch_fork
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_strategies import PROMPTS
from tests.lossless.test_tensor_parallel import SIZES
from tests.tiny_models.lora import ALL, make_adapter
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("uno"),
]


def flat_model(folder: Path) -> Path:
    """A target that often says the same token again, so that rows of noise are right now and then."""
    return make_tiny_model(folder, initializer_range=0.02)


@asynccontextmanager
async def verifier(
    model: Path, adapter: Path | None, link: str, *, stages: int = 1, ranks: int = 1, **form: Any
) -> AsyncIterator[VerifierService]:
    named: Mapping[str, Path] = {} if adapter is None else {"uno": adapter}
    drafter = DrafterService(DrafterConfig(trained=TrainedConfig(checkpoints=named, target=model, **form)))
    config = VerifierConfig(
        model_name="tiny",
        target=TargetConfig(
            model_path=str(model),
            kv_cache_tokens=2048,
            max_model_len=512,
            threads=1,
            draft_adapter=adapter,
            stages=stages,
            tensor_parallel_size=ranks,
        ),
        loop=LoopConfig(max_batched_tokens=50, draft_deadline_s=5.0),
        budget="fixed",
    )
    async with linked(drafter, link) as draft_link:
        running = VerifierService(config, [origin(draft_link)], launch=launch_fork)
        await running.start()
        try:
            yield running
        finally:
            await running.stop()


async def said(running: VerifierService, plan: Plan, sampling: Mapping[str, Any]) -> list[list[int]]:
    wanted = [
        request(f"r{at}", prompt, plan, **{"max_tokens": 40, "ignore_eos": True, **sampling})
        for at, prompt in enumerate(PROMPTS)
    ]
    return [tokens for tokens, _, _ in await asyncio.gather(*(collect(running.loop, each) for each in wanted))]


UNO = Plan(strategy="uno", sources=("uno",), max_nodes=24, observe_top_k=8, effort="paper")
BLEND = replace(UNO, strategy="auto", sources=("suffix", "recycling", "uno"), effort="measured")


@pytest.mark.examples(3)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize("ends", [0, 2], ids=["in turns", "noise beside trees"])
async def test_no_token_changes(tmp_path: Path, link: str, ends: int) -> None:
    model = flat_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model, seed=8, size=0.02)
    async with verifier(model, adapter, link, uno_branches=ends, num_steps=3) as running:
        stats = running.loop.stats
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"temperature": 0.7, "top_k": 1, "seed": 2}):
            plain = await said(running, PLAIN, sampling)
            for plan in (UNO, BLEND):
                assert await said(running, plan, sampling) == plain, (plan.sources, sampling)
        certain = {"temperature": 0.7, "top_k": 1, "seed": 2}
        assert await said(running, replace(UNO, acceptance="rejection"), certain) == plain
        assert stats.probes_by_source["uno"] > 50 and stats.nodes_by_source["uno"] > 50
        assert stats.accepted_by_source["uno"] > 0 and not stats.drafts_malformed


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (1, 2)])
async def test_no_token_changes_over_stages_and_ranks(tmp_path: Path, stages: int, ranks: int) -> None:
    """And tokens of rows of noise are accepted there, too."""
    model = make_tiny_model(tmp_path / "model", **{**SIZES, "initializer_range": 0.02})
    adapter = make_adapter(tmp_path / "adapter", model, seed=8, size=0.02)
    found = {}
    for split in ((1, 1), (stages, ranks)):
        async with verifier(model, adapter, "grpc", num_steps=3, stages=split[0], ranks=split[1]) as running:
            stats, answers = running.loop.stats, []
            for sampling in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
                plain = await said(running, PLAIN, sampling)
                assert await said(running, UNO, sampling) == plain
                answers.append(plain)
            assert await said(running, BLEND, sampling) == plain
            assert stats.accepted_by_source["uno"] > 0 and not stats.drafts_malformed
            found[split] = answers
    assert len({str(each) for each in found.values()}) == 1


async def test_the_targets_rows_of_noise_are_the_drafts_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Rows] = []
    begin = TransformersTarget.begin

    def noting(target: TransformersTarget, batch: Sequence[Rows], *, whole: bool = False) -> None:
        passes.extend(batch)
        begin(target, batch, whole=whole)

    monkeypatch.setattr(TransformersTarget, "begin", noting)
    model = flat_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model, seed=8, size=0.02)
    async with verifier(model, adapter, "in_process", num_steps=3) as running:
        passes.clear()
        await collect(running.loop, request("r", PROMPTS[0], UNO, max_tokens=30, ignore_eos=True))
    drafted = [rows for rows in passes if rows.parents]
    # In turns: a chain of noise behind the last token, and a tree without any. Where no tree came of it, noise follows noise.
    noisy = [rows for rows in drafted if rows.noise]
    for rows in noisy:
        assert rows.noise == tuple(range(rows.chain, len(rows.tokens))) and rows.parents == (-1, 0, 1)[: len(rows.parents)]
    assert drafted[0] in noisy and 0 < len(drafted) - len(noisy) <= len(noisy)
    assert len(drafted) > 10


async def test_passes_are_as_few_as_the_drafts_are_good(tmp_path: Path) -> None:
    """A pass of noise yields a token as every pass does, so turns cost no pass, however bad the drafts are."""
    model = flat_model(tmp_path / "model")
    adapter = make_adapter(tmp_path / "adapter", model, seed=8, size=0.02, targets=ALL)
    async with verifier(model, adapter, "in_process", num_steps=3) as running:
        tokens, finished, steps = await collect(running.loop, request("r", PROMPTS[0], UNO, max_tokens=60, ignore_eos=True))
        assert len(tokens) == 60 and finished.reason is not None
        accepted = sum(len(step.accepted_sources) - step.accepted_sources.count("target") for step in steps)
        assert len(steps) == 60 - running.loop.stats.accepted_by_source.get("uno", 0) == 60 - accepted
