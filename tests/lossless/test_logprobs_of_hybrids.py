"""Log-probabilities of models whose layers have states, through trees, chunks and batches: those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.links.in_process import InProcessDraftLink
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.types import Plan, TokenLogprobs
from tests.engine.fakes import PLAIN, collect, decoding, request
from tests.lossless.architectures import GuidedDrafter
from tests.lossless.hybrids import make_hybrid

pytestmark = pytest.mark.xdist_group("hybrids")

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [40, 41, 42] * 20, [100 + i for i in range(70)]]
ANSWER, LIKELIEST = 20, 4
GUIDED = Plan(strategy="guided", sources=("guided",), max_nodes=12)
# Nats: sums in another order, through four layers of float32.
NEAR = 1e-3
# Of each family one; Mamba's with heads, Qwen3-Next's with experts.
FAMILIES = (
    "qwen3_next",
    "lfm2",
    "mamba",
    "mamba2",
    "rwkv",
    "kimi_linear",
    "minimax",
    "recurrent_gemma",
    "zamba",
    "lfm2_moe",
)


async def told(target: TransformersTarget, plan: Plan, wanted: list[list[int]]) -> list[list[TokenLogprobs]]:
    """What the service says of the tokens of each answer; all are asked for at once."""
    asked = {"max_tokens": ANSWER, "ignore_eos": True, "logprobs": LIKELIEST}
    link = InProcessDraftLink(GuidedDrafter(target.vocab_size, wanted))
    async with decoding(target, link, max_batched_tokens=50) as loop:
        answers = [request(f"r{number}", prompt, plan, **asked) for number, prompt in enumerate(PROMPTS)]
        found = await asyncio.gather(*(collect(loop, one) for one in answers))
    return [[token for step in steps for token in step.logprobs] for _, _, steps in found]


@torch.inference_mode()
def of_transformers(folder: Path, texts: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[rows, vocabulary] of each text, and of the same text with another token before the prompt's last one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def of(text: list[int]) -> torch.Tensor:
        return model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)

    changed = [[*text[: len(prompt) - 2], 3, *text[len(prompt) - 1 :]] for prompt, text in zip(PROMPTS, texts, strict=True)]
    return [(of(text), of(other)) for text, other in zip(texts, changed, strict=True)]


@pytest.mark.parametrize(
    "model_type",
    [*FAMILIES[:5], *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in FAMILIES[5:])],
)
async def test_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    folder = make_hybrid(model_type, tmp_path / "model")
    config = TargetConfig(model_path=str(folder), kv_cache_tokens=2048, max_model_len=256, threads=1)
    target = TransformersTarget(config)
    plain = await told(target, PLAIN, [])
    wanted = [[*prompt, *(token.token_id for token in answer)] for prompt, answer in zip(PROMPTS, plain, strict=True)]
    assert await told(target, GUIDED, wanted) == plain
    for prompt, answer, (rows, moved) in zip(PROMPTS, plain, of_transformers(folder, wanted), strict=True):
        assert len(answer) == ANSWER
        # What is compared moves by more when a state does.
        assert (moved - rows)[len(prompt) - 1].abs().max() > 10 * NEAR
        for row, token in zip(rows[len(prompt) - 1 : -1], answer, strict=True):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=NEAR)
            values = row[list(token.top_ids)].tolist()
            assert list(token.top_logprobs) == pytest.approx(values, abs=NEAR) and len(values) == LIKELIEST
            # None is left out that is clearly likelier.
            assert row.topk(LIKELIEST).values.tolist() == pytest.approx(list(token.top_logprobs), abs=NEAR)
