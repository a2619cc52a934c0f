"""Models that draft in the drafter's process or beside the target: the tokens of plain decoding in both places."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.build import Pipeline
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from speculation.errors import ConfigurationError
from tests.engine.layouts import in_one_process
from tests.running.refusals import refuses
from tests.servers.service import pipeline
from tests.tiny_models import trained_heads
from tests.tiny_models.draft_models import draft_beside
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import heads_beside

PROMPTS: tuple[tuple[int, ...], ...] = ((5, 6, 7, 8, 9, 5, 6, 7), (40, 41, 42) * 20, tuple(range(100, 160)), (17,))
SAMPLING: tuple[Mapping[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 7})
MODELS = (*trained_heads.MODELS, "draft_model")
# Every step waits for the models' drafts, an answer's first ones too: so each model drafts 70 nodes and more in four answers.
_TOKENS = 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a checkpoint of every kind beside it."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target")


def flags(target: Path, place: str, *names: str) -> list[str]:
    folders = {**heads_beside(target), "draft_model": draft_beside(target)}
    named = ", ".join(str(folders[name]) for name in names)
    return [f"drafter.models=[{named}]", f"drafter.models_in={place}", "verifier.draft_deadline_s=10"]


async def answers(running: Pipeline, strategy: str, sampling: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of every prompt, all at once."""

    async def answer(prompt: tuple[int, ...]) -> list[int]:
        params = RequestedSampling(max_tokens=_TOKENS, **{"ignore_eos": True, **sampling})
        wanted = ClientRequest(input=prompt, sampling=params, strategy=strategy, tenant="")
        events = running.router.generate(wanted)
        return [token async for event in events if isinstance(event, TextChunk) for token in event.token_ids]

    return list(await asyncio.gather(*(answer(prompt) for prompt in PROMPTS)))


@pytest.fixture(scope="module")
async def plain(target: Path) -> list[list[list[int]]]:
    """Plain decoding where no model drafts, under each sampling, in one process."""
    with in_one_process():
        async with pipeline(target, "drafter.models=[]") as running:
            return [await answers(running, "autoregressive", sampling) for sampling in SAMPLING]


async def compare(
    running: Pipeline, strategy: str, model: str, sampling: Mapping[str, Any], expected: list[list[int]]
) -> None:
    """Compare the answers with plain decoding's, again if a busy machine has kept the model from drafting in time."""
    nodes = running.verifier.loop.stats.nodes_by_source
    before = nodes.get(model, 0)
    for _ in range(20):
        assert await answers(running, strategy, sampling) == expected, (strategy, sampling)
        if nodes.get(model, 0) > before + 20:
            return
    raise AssertionError(f"{model} hardly drafts under {strategy}: {nodes}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["drafter", "verifier"])
async def test_every_strategy_in_both_places(target: Path, place: str, plain: list[list[list[int]]]) -> None:
    async with pipeline(target, *flags(target, place, *MODELS)) as running:
        for strategy in (*MODELS, "blend"):
            model = "dflash" if strategy == "blend" else strategy
            for sampling, expected in zip(SAMPLING, plain, strict=True):
                await compare(running, strategy, model, sampling, expected)
        assert not running.verifier.loop.stats.drafts_malformed
        # Whose process it was.
        assert bool(running.drafter._models) == (place == "drafter")


@pytest.mark.examples(6)
@pytest.mark.parametrize("place", ["drafter", "verifier"])
@pytest.mark.parametrize(("form", "below"), [("one_pass", 0.002), ("one_pass", 0), ("cheaper", 0)])
async def test_streams_in_the_targets_pass(
    target: Path, place: str, form: str, below: float, plain: list[list[list[int]]]
) -> None:
    named = [
        *flags(target, place, "streaming"),
        f"drafter.streaming_form={form}",
        f"drafter.streaming_prune_below={below}",
    ]
    async with pipeline(target, *named) as running:
        for strategy in ("streaming", "blend"):
            for sampling, expected in zip(SAMPLING, plain, strict=True):
                await compare(running, strategy, "streaming", sampling, expected)


async def test_a_form_without_streams_is_refused(target: Path) -> None:
    with refuses(ConfigurationError, field="drafter.streaming_form", value="one_pass"):
        async with pipeline(target, *flags(target, "drafter", "medusa"), "drafter.streaming_form=one_pass"):
            raise AssertionError("it was served")


async def test_pruning_without_a_pass_to_prune_is_refused(target: Path) -> None:
    with refuses(ConfigurationError, "drafter.streaming_prune_below", "0.1", "streaming_form is two_steps"):
        async with pipeline(target, *flags(target, "drafter", "streaming"), "drafter.streaming_prune_below=0.1"):
            raise AssertionError("it was served")


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["drafter", "verifier"])
@pytest.mark.parametrize("model", ["eagle3", "draft_model"])
async def test_the_blend_with_another_model(target: Path, place: str, model: str, plain: list[list[list[int]]]) -> None:
    async with pipeline(target, *flags(target, place, model)) as running:
        for sampling, expected in zip(SAMPLING, plain, strict=True):
            await compare(running, "blend", model, sampling, expected)
