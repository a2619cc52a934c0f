"""What a model's generation_config.json does to logits, against ``generate`` with the same file: bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from services.api.messages import RequestedSampling
from services.model_files.generation_config import FILE, read_generation_config
from services.router.sampling import complete_sampling
from services.verifier.choosing.processors import build_pipeline
from speculation.acceptance import stop_token_ids
from tests.tiny_models.generation import PROMPT, VOCABULARY, card, write

# Fields that work on logits, one by one and together; the model's end-of-text token is 0.
CONFIGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.9},
    {"repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 1.6},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[41], [40, 43], [43, 40, 41], [0]]},
    {"sequence_bias": [[[50], 3.5], [[41, 60], 20.0], [[41, 61], -20.0]]},
    {"suppress_tokens": [3, 50, 51]},
    {"begin_suppress_tokens": [44, 45, 0]},
    {"forced_eos_token_id": 0},
    {"forced_eos_token_id": [7, 0]},
    {"forced_bos_token_id": 9, "begin_suppress_tokens": [44]},
    {"min_length": 12},
    {"min_new_tokens": 6, "min_length": 30},
    {"exponential_decay_length_penalty": [2, 1.5], "eos_token_id": 7},
    {"remove_invalid_values": True, "suppress_tokens": [4]},
    {"renormalize_logits": True},
    {"do_sample": True, "top_h": 0.4, "top_k": 0},
    {"do_sample": True, "typical_p": 0.7, "top_k": 0},
    {"do_sample": True, "epsilon_cutoff": 0.003, "temperature": 0.8},
    {"do_sample": True, "eta_cutoff": 0.01},
    {
        "do_sample": True, "temperature": 0.7, "top_p": 0.95, "typical_p": 0.9, "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3, "encoder_repetition_penalty": 0.8, "suppress_tokens": [5], "bad_words_ids": [[40, 41]],
        "begin_suppress_tokens": [0], "min_new_tokens": 3, "forced_eos_token_id": 0, "renormalize_logits": True,
        "exponential_decay_length_penalty": [4, 1.1], "sequence_bias": [[[41, 44], 2.0]], "eta_cutoff": 0.0003,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return loaded


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model's small files alone."""
    for name in ("config.json", FILE):
        shutil.copy(tiny_model / name, tmp_path / name)
    return tmp_path


def of_generate(
    model: PreTrainedModel, folder: Path, prompt: tuple[int, ...], tokens: int
) -> Iterator[tuple[Any, Any, list[int]]]:
    """Raw logits, what ``generate`` made of them, and the tokens before, position by position."""
    model.generation_config = GenerationConfig.from_pretrained(folder)
    torch.manual_seed(0)
    ids = torch.tensor([prompt])
    more = {} if model.generation_config.max_new_tokens or model.generation_config.max_length else {"max_new_tokens": tokens}
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=0, output_scores=True, output_logits=True,
        return_dict_in_generate=True, **more,
    )  # fmt: skip
    answer = made.sequences[0].tolist()
    for place, (raw, scores) in enumerate(zip(made.logits, made.scores, strict=True)):
        yield raw[0], scores[0], answer[: len(prompt) + place]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: ",".join(config) or "empty")
@pytest.mark.filterwarnings("ignore")
def test_logits_become_what_generate_makes_of_them(model: PreTrainedModel, folder: Path, config: dict[str, Any]) -> None:
    write(folder, **config)
    found = read_generation_config(folder, vocab_size=VOCABULARY)
    tokens, changed = 24, False
    for prompt in (PROMPT, (17,)):
        params = complete_sampling(RequestedSampling(max_tokens=tokens), card(found.defaults), len(prompt))
        assert (params.temperature > 0) == bool(config.get("do_sample"))
        pipeline = build_pipeline(
            params,
            prompt_length=len(prompt),
            stop_ids=stop_token_ids(params, found.eos_token_ids),
            model=found.processors,
        )
        for raw, scores, history in of_generate(model, folder, prompt, tokens):
            ours = raw if pipeline is None else pipeline(raw, history)
            assert torch.equal(ours, scores)
            changed = changed or not torch.equal(raw, scores)
    # A case that changes nothing shows nothing.
    assert changed == (bool(config) and config.keys() != {"temperature", "top_p"})
