"""Answers with LoRA adapters: two adapters and the model itself in one batch, drafted for by every text source over both links,
have the tokens of plain decoding by a server of that one adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.drafter.config import DrafterConfig, SuffixConfig, TrainedConfig
from services.drafter.service import DrafterService
from services.verifier.config import KVCacheDtype, TargetConfig, VerifierConfig
from services.verifier.engine.config import LoopConfig
from services.verifier.service import VerifierService
from speculation.errors import NotBegun
from speculation.messages import Finished, GenerationRequest, Progress
from speculation.sources import STRATEGIES
from speculation.types import Plan
from tests.drafters.draft_links import linked
from tests.engine.fakes import PLAIN, RandomRetriever, origin, request
from tests.engine.stage_threads import launch_thread
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_strategies import plan_of
from tests.running.patience import PATIENCE_S
from tests.tiny_models.draft_models import draft_beside
from tests.tiny_models.lora import WITH_ENDS, make_adapter
from tests.tiny_models.trained_heads import heads_beside

pytestmark = needs_kernels

NAMES = ("", "one", "two")
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [40, 41, 42] * 25, [17]]
SAMPLING: list[dict[str, object]] = [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}]
DRAFTED = Plan(strategy="blend", sources=STRATEGIES["blend"], max_nodes=12, observe_top_k=8)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    ranks = {"model.layers.1.mlp.up_proj": 17}
    return {
        "one": str(make_adapter(folder / "one", tiny_model, seed=1, targets=WITH_ENDS)),
        "two": str(make_adapter(folder / "two", tiny_model, seed=2, rank=3, ranks=ranks, targets=("q_proj", "up_proj"))),
    }


@asynccontextmanager
async def verifier(
    folder: Path,
    adapters: dict[str, str],
    link: str = "in_process",
    *,
    kv_cache_tokens: int = 4096,
    stages: int = 1,
    ranks: int = 1,
    models: Mapping[str, Path] | None = None,
    draft_deadline_s: float = 0.025,
    headroom: int = 64,
    kv_cache_dtype: KVCacheDtype = "auto",
    weights_from: tuple[Path, ...] = (),
    lora_folders: tuple[Path, ...] = (),
) -> AsyncIterator[VerifierService]:
    """A verifier with adapters, by name.

    Args:
        models: those that draft, by source.
    """
    trained = TrainedConfig(checkpoints=models or {}, target=folder)
    config = DrafterConfig(suffix=SuffixConfig(max_cached_tokens=2000), trained=trained)
    drafter = DrafterService(config, RandomRetriever(vocab=250))
    target = TargetConfig(
        model_path=str(folder), kv_cache_tokens=kv_cache_tokens, max_model_len=256, threads=1, lora_modules=adapters, stages=stages,
        tensor_parallel_size=ranks, kv_cache_dtype=kv_cache_dtype, lora_folders=lora_folders,
    )  # fmt: skip
    loop = LoopConfig(max_batched_tokens=50, draft_deadline_s=draft_deadline_s, headroom=headroom)
    verifier_config = VerifierConfig(model_name="tiny", target=target, loop=loop, budget="fixed", weights_from=weights_from)
    async with linked(drafter, link) as draft_link:
        running = VerifierService(verifier_config, [origin(draft_link)], launch_thread)
        await running.start()
        try:
            yield running
        finally:
            await running.stop()


def asked(adapter: str, prompt: list[int], plan: Plan, **sampling: Any) -> GenerationRequest:
    wanted = request(f"{adapter}/{len(prompt)}", prompt, plan, max_tokens=70, **{"ignore_eos": True, **sampling})
    return replace(wanted, adapter=adapter, tenant="t")


async def said(running: VerifierService, wanted: GenerationRequest) -> list[int]:
    return [token async for event in running.generate(wanted) if isinstance(event, Progress) for token in event.token_ids]


@pytest.fixture(scope="module", params=SAMPLING, ids=["greedy", "sampled"])
def sampling(request: pytest.FixtureRequest) -> dict[str, object]:
    found: dict[str, object] = request.param
    return found


@pytest.fixture(scope="module")
def plain(tiny_model: Path, folders: dict[str, str], sampling: dict[str, object]) -> dict[str, list[list[int]]]:
    """Answers of servers with one adapter each, one request at a time."""

    async def of(name: str) -> list[list[int]]:
        async with verifier(tiny_model, {name: folders[name]} if name else {}) as running:
            return [await said(running, asked(name, prompt, PLAIN, **sampling)) for prompt in PROMPTS]

    return {name: asyncio.run(of(name)) for name in NAMES}


def test_answers_differ_by_adapter(plain: dict[str, list[list[int]]]) -> None:
    assert len({tuple(answers[1]) for answers in plain.values()}) == len(NAMES)


@pytest.mark.examples(9)
@pytest.mark.parametrize("link", ["in_process", "grpc"])
@pytest.mark.parametrize("kv_cache_tokens", [4096, 448], ids=["room for all", "some are preempted"])
@pytest.mark.parametrize(
    ("stages", "ranks"),
    [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2)],
    ids=["one process", "two stages", "two ranks", "four ranks", "two by two"],
)
async def test_all_in_one_batch(
    tiny_model: Path,
    folders: dict[str, str],
    plain: dict[str, list[list[int]]],
    sampling: dict[str, object],
    link: str,
    kv_cache_tokens: int,
    stages: int,
    ranks: int,
) -> None:
    split = {"stages": stages, "ranks": ranks}
    # No room is kept for those that run, so that some give way though answers end soon behind a border of a block.
    async with verifier(tiny_model, folders, link, kv_cache_tokens=kv_cache_tokens, headroom=0, **split) as running:
        # The second time, prefixes are shared and drafts come from the tenant's answers.
        for _ in range(2):
            wanted = [(name, at, asked(name, PROMPTS[at], DRAFTED, **sampling)) for at in range(3) for name in NAMES]
            found = await asyncio.gather(*(said(running, each) for _, _, each in wanted))
            for (name, at, _), tokens in zip(wanted, found, strict=True):
                assert tokens == plain[name][at], (name, at)
        stats = running.loop.stats
        assert sum(stats.accepted_by_source.values()) > 0
        assert (stats.preemptions > 0) == (kv_cache_tokens < 4096)


@pytest.mark.examples(2)
async def test_an_answer_moves_to_who_has_the_adapter(
    tiny_model: Path, folders: dict[str, str], plain: dict[str, list[list[int]]], sampling: dict[str, object]
) -> None:
    wanted = asked("two", PROMPTS[1], DRAFTED, **sampling)
    begun: list[int] = []
    arithmetic = ""
    async with verifier(tiny_model, folders) as first:
        events = first.generate(wanted)
        async for event in events:
            assert isinstance(event, Progress)
            begun += event.token_ids
            arithmetic = event.arithmetic or arithmetic
            if len(begun) > 20:
                break
        await events.aclose()
        card = await first.describe()
    assert arithmetic == card.adapters["two"] != card.adapters["one"] != card.arithmetic
    moved = replace(wanted, committed=tuple(begun), arithmetic=arithmetic)
    for stages, ranks in ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2)):
        async with verifier(tiny_model, {"two": folders["two"]}, stages=stages, ranks=ranks) as second:
            assert begun + await said(second, moved) == plain["two"][1]
    async with verifier(tiny_model, {"two": folders["one"]}) as another:
        with pytest.raises(NotBegun):
            await said(another, moved)
    async with verifier(tiny_model, {"one": folders["one"]}) as without:
        with pytest.raises(NotBegun):
            await said(without, wanted)


async def test_the_model_itself_does_not_go_on_with_an_adapters_answer(tiny_model: Path, folders: dict[str, str]) -> None:
    async with verifier(tiny_model, folders) as running:
        wanted = asked("one", PROMPTS[0], PLAIN)
        first = await anext(running.generate(wanted))
        assert isinstance(first, Progress) and not isinstance(first, Finished)
        with pytest.raises(NotBegun):
            await said(running, replace(wanted, adapter="", committed=first.token_ids, arithmetic=first.arithmetic))


@pytest.mark.examples(4)
@pytest.mark.parametrize("link", ["grpc", "in_process"])
async def test_models_draft_for_an_adapter(tiny_model: Path, tmp_path: Path, sampling: dict[str, object], link: str) -> None:
    """Made for the model itself: a draft model that knows no adapter, and a head that reads states which have gone through one."""
    folders = {"near": str(make_adapter(tmp_path / "near", tiny_model, seed=5, size=0.05))}
    async with verifier(tiny_model, folders) as running:
        wanted = [await said(running, asked("near", prompt, PLAIN, **sampling)) for prompt in PROMPTS]
        assert wanted != [await said(running, asked("", prompt, PLAIN, **sampling)) for prompt in PROMPTS]
    heads = heads_beside(tiny_model)
    models = {"draft_model": draft_beside(tiny_model), "fspad": heads["fspad"], "medusa": heads["medusa"]}
    async with verifier(tiny_model, folders, link, models=models, draft_deadline_s=5.0) as running:
        taken = running.loop.stats.accepted_by_source
        for name in models:
            async with asyncio.timeout(PATIENCE_S):
                # The model is loaded when a request first names it.
                while not taken.get(name):
                    drafted = [asked("near", prompt, plan_of((name,)), **sampling) for prompt in PROMPTS]
                    assert await asyncio.gather(*(said(running, each) for each in drafted)) == wanted, name
        assert not running.loop.stats.drafts_malformed
