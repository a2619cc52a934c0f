"""What is seen of a model's attention before it is served: sizes for the pool, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.verifier.attention.calls import Given, Running, answering, attend
from services.verifier.attention.masks import Sight
from services.verifier.attention.recording import _Recorder
from services.verifier.config import TargetConfig
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.attention_models import ARCHITECTURES, make_architecture
from tests.tiny_models.tiny import make_tiny_model


@pytest.mark.examples(9)
@pytest.mark.parametrize("kind", ["plain", *ARCHITECTURES])
def test_memory_is_reckoned_by_what_the_pool_will_hold(tmp_path: Path, kind: str) -> None:
    """The one on a model without weights, the other on the model."""
    if kind == "plain":
        make_tiny_model(tmp_path)
    else:
        make_architecture(tmp_path, kind)
    config = TargetConfig(model_path=str(tmp_path), kv_cache_tokens=1024, max_model_len=400)
    pool = TransformersTarget(config).pool
    numbers = sum(tensor.numel() for tensor in (*pool.keys, *pool.values))
    assert shape_of(config).cache_values_per_token == numbers / BLOCK / (pool.total_blocks + 1)


SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("doge", {}, "computes with its attention mask"),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 16}, "not causal"),
        ("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "do not call transformers' attention interface"),
    ],
)
def test_refused_by_name(tmp_path: Path, kind: str, settings: dict[str, Any], reason: str) -> None:
    known = AutoConfig.for_model(kind).to_dict().keys()
    config = AutoConfig.for_model(kind, **{name: value for name, value in SMALL.items() if name in known}, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with refuses(ConfigurationError, says=reason):
        TransformersTarget(TargetConfig(model_path=str(tmp_path), kv_cache_tokens=512))


ROWS = torch.zeros(1, 4, 3, 16)


def called(**given: object) -> None:
    """A call of attention over three rows, recorded; everything is as it should be, but for what is ``given``."""
    arguments: dict[str, Any] = {"query": ROWS, "key": ROWS[:, :2], "value": ROWS[:, :2], "attention_mask": Sight(), **given}
    with answering(_Recorder(100)):
        attend(nn.Module(), **arguments)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_mask": None}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
        ({"attention_mask": Sight(reason="neither causal")}, "neither causal"),
        ({"sliding_window": 8}, "sliding window is 8, that of its mask None"),
        ({"sliding_window": 8, "attention_mask": Sight(window=9)}, "sliding window is 8, that of its mask 9"),
        ({"position_bias": torch.zeros(1)}, "attention with position_bias is not supported"),
        ({"s_aux": torch.zeros(3)}, r"sinks are \(3,\): must be one for each head"),
        ({"key": ROWS[:, :3], "value": ROWS[:, :3]}, "not over its own rows"),
        ({"key": ROWS[:, :2, :2], "value": ROWS[:, :2, :2]}, "not over its own rows"),
    ],
)
def test_calls_that_are_refused(given: dict[str, object], reason: str) -> None:
    called(sliding_window=200)
    called(sliding_window=8, attention_mask=Sight(window=8), is_causal=True, position_ids=ROWS, head_mask=None)
    with pytest.raises(NotImplementedError, match=reason):
        called(**given)


def test_a_model_must_go_on_as_it_began() -> None:
    class Answered:
        positions = torch.arange(3)

        def attend(self, call: object, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return query.transpose(1, 2)

    once, twice, never = nn.Module(), nn.Module(), nn.Module()
    recorder = _Recorder(100)
    given = Given(mask=Sight(), scale=0.25, window=None, softcap=None, sinks=None, bias=None, others={})
    for module in (once, twice, twice):
        recorder.attend(module, ROWS, ROWS, ROWS, given)
    assert [call.entry for call in recorder.calls[twice]] == [1, 2]
    running = Running(Answered(), recorder.calls)
    for module in (twice, once, once, twice):
        running.attend(module, ROWS, ROWS, ROWS, given)
    with pytest.raises(NotImplementedError, match="calls attention 3 times, at first 2"):
        running.attend(twice, ROWS, ROWS, ROWS, given)
    with pytest.raises(NotImplementedError, match="calls attention 1 times, at first 0"):
        running.attend(never, ROWS, ROWS, ROWS, given)
    with pytest.raises(NotImplementedError, match="pass to pass"):
        running.attend(once, ROWS, ROWS[:, :2], ROWS[:, :2], given)
    with pytest.raises(NotImplementedError, match="no pass runs"):
        attend(once, ROWS, ROWS, ROWS, None)
