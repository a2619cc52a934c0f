"""A model's own generation_config.json: under every strategy the tokens of plain decoding, and greedily those of
transformers' own ``generate``."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.model_files.generation_config import read_generation_config
from speculation.sources import SOURCES, STRATEGIES
from speculation.types import Plan
from tests.engine.fakes import PLAIN, collect, request
from tests.engine.layouts import in_one_process
from tests.lossless.test_strategies import PROMPTS, answers, plan_of, said, verifier

# What models' own files do to logits, by which a token's chance depends on its path or on how long the answer is.
PROCESSORS: list[dict[str, object]] = [
    {"no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.3, "suppress_tokens": [9], "typical_p": 0.95, "top_h": 0.8},
    {
        "bad_words_ids": [[41, 42], [6, 7, 8], [11]], "sequence_bias": [[[40, 41], 4.0], [[5], -1.5], [[7, 8, 9], 9.0]],
        "encoder_no_repeat_ngram_size": 4, "begin_suppress_tokens": [5, 40], "forced_eos_token_id": [0], "min_new_tokens": 9,
        "exponential_decay_length_penalty": [12, 1.01], "renormalize_logits": True, "epsilon_cutoff": 0.0003,
    },
]  # fmt: skip


def with_generation_config(tiny_model: Path, folder: Path, **content: object) -> Path:
    copy = Path(shutil.copytree(tiny_model, folder / "model"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **content}))
    return copy


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 4}, {}], ids=str
)
@pytest.mark.parametrize("processors", PROCESSORS, ids=["paths", "lengths"])
async def test_a_models_own_processors_under_every_strategy(
    tiny_model: Path, tmp_path: Path, processors: dict[str, object], sampling: dict[str, object]
) -> None:
    folder = with_generation_config(tiny_model, tmp_path, **processors)
    asked: dict[str, object] = {"ignore_eos": False, **sampling}
    with in_one_process():
        plain = await answers(folder, "real", "in_process", PLAIN, asked, together=False)
    assert plain != await answers(
        folder, "real", "in_process", PLAIN, {**asked, "ignore_generation_config": True}, together=False
    )
    async with verifier(folder, "real", "in_process", "fixed") as running:
        for sources in [*((source,) for source in SOURCES), (*STRATEGIES["blend"], "retrieval", "spectra_core")]:
            assert await said(running, plan_of(sources), asked, together=True) == plain, sources
    garbage = Plan(strategy="random", sources=("random",), max_nodes=8)
    assert await answers(folder, "random", "in_process", garbage, asked, together=True) == plain, "random"


async def test_what_has_no_effect_here_may_say_anything(tiny_model: Path, tmp_path: Path) -> None:
    plain = await answers(tiny_model, "real", "in_process", PLAIN, {}, together=True)
    for name, value in (("pad_token_id", "x"), ("early_stopping", 7), ("compile_config", {}), ("validate", 1)):
        folder = with_generation_config(tiny_model, tmp_path / name, **{name: value})
        assert await answers(folder, "real", "in_process", PLAIN, {}, together=True) == plain


@pytest.mark.examples(18)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "processors",
    [
        *PROCESSORS,
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2, "min_length": 40},
        {"encoder_repetition_penalty": 0.6, "begin_suppress_tokens": [0]},
        {"bad_words_ids": [[41], [40, 43], [257], [0]], "suppress_tokens": [5, 6]},
        {"sequence_bias": [[[50], 3.5], [[41, 60], 20.0]], "forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": [5, 1.3], "eos_token_id": [300, 7], "remove_invalid_values": True},
        {"forced_bos_token_id": 33, "begin_suppress_tokens": [34], "renormalize_logits": True},
        {"eos_token_id": [0, 320], "min_new_tokens": 12},
    ],
    ids=lambda content: ",".join(content),
)
async def test_greedily_a_models_own_file_gives_what_generate_gives(
    tiny_model: Path, tmp_path: Path, processors: dict[str, object]
) -> None:
    folder = with_generation_config(tiny_model, tmp_path, **processors)
    found = read_generation_config(folder).defaults
    lengths = [
        max(found.min_tokens or 0, 0 if found.min_tokens is not None else (found.min_length or 0) - len(prompt), 0)
        for prompt in PROMPTS
    ]
    plan = Plan(strategy="any", sources=STRATEGIES["blend"], max_nodes=20, observe_top_k=6)
    wanted = [
        request(f"r{i}", prompt, plan, max_tokens=60, min_tokens=length)
        for i, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]
    async with verifier(folder, "real", "in_process", "fixed") as running:
        ours = [tokens for tokens, _, _ in await asyncio.gather(*(collect(running.loop, one) for one in wanted))]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, pad_token_id=0)
        assert tokens == theirs[0, len(prompt) :].tolist()
