"""The guard at a model's load: what is planted is refused by name, and what is right passes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedModel,
)

from services.verifier.checks.guard import check_slice
from services.verifier.config import Dtype, TargetConfig
from services.verifier.model import fused_layers
from services.verifier.model import slice as model_slice
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.4, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip


def config_of(folder: Path, **settings: Any) -> TargetConfig:
    return TargetConfig(model_path=str(folder), kv_cache_tokens=256, max_model_len=128, threads=1, **settings)


_FURTHEST = 10_000
Plant = Callable[[PreTrainedModel], None]


def planted(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    """Change every model that is loaded."""
    load = model_slice.load_whole

    def changed(config: TargetConfig) -> PreTrainedModel:
        model = load(config)
        plant(model)
        return model

    monkeypatch.setattr(model_slice, "load_whole", changed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_model_that_is_right(tiny_model: Path, caplog: pytest.LogCaptureFixture, dtype: Dtype) -> None:
    caplog.set_level(logging.INFO)
    part = ModelSlice(config_of(tiny_model, dtype=dtype), 0)
    forwards = [dict(vars(module)) for module in part.model.modules()]
    check_slice(part)
    assert "LlamaForCausalLM (model_type llama) is served as its own eager attention computes it; checked in" in caplog.text
    assert [dict(vars(module)) for module in part.model.modules()] == forwards
    assert part.model.config._attn_implementation == "outrider"
    with pytest.raises(KeyError):
        part.pool.blocks_of("text")


def test_a_layer_that_ignores_its_positions(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(model: PreTrainedModel) -> None:
        turn = model.model.rotary_emb

        class Counting(nn.Module):
            def forward(self, rows: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                made: tuple[torch.Tensor, torch.Tensor] = turn(rows, torch.arange(rows.shape[1])[None])
                return made

        model.model.rotary_emb = Counting()

    planted(monkeypatch, ignore)
    with refuses(ConfigurationError, field="LlamaForCausalLM (model_type llama)"):
        TransformersTarget(config_of(tiny_model))


def mask_of_transformers(hidden: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Let transformers' own attention hide other keys than the layers say; by how far before the row they are."""

    def replace(module: Any, rows: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if module.self_attn.config._attn_implementation in ("eager", "sdpa"):
            at = torch.arange(rows[0].shape[1])
            seen = torch.zeros(1, 1, len(at), len(at), dtype=rows[0].dtype)
            named["attention_mask"] = seen.masked_fill(hidden(at[:, None] - at), torch.finfo(seen.dtype).min)
        return rows, named

    def plant(model: PreTrainedModel) -> None:
        for layer in model.model.layers:
            layer.register_forward_pre_hook(replace, with_kwargs=True)

    return plant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_that_is_in_the_mask_alone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype) -> None:
    planted(monkeypatch, mask_of_transformers(lambda before: (before < 0) | (before >= 12)))
    with refuses(ConfigurationError, field="LlamaForCausalLM (model_type llama)"):
        TransformersTarget(config_of(tiny_model, dtype=dtype))


def test_a_model_that_is_not_causal(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, mask_of_transformers(lambda before: before < -_FURTHEST))
    with refuses(ConfigurationError, field="LlamaForCausalLM (model_type llama)"):
        TransformersTarget(config_of(tiny_model))


def test_weights_that_are_no_numbers(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda model: model.model.norm.weight.data.fill_(float("nan")))
    with refuses(ConfigurationError, field="LlamaForCausalLM (model_type llama)"):
        TransformersTarget(config_of(tiny_model))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_norm_that_is_applied_twice_in_stages(tmp_path: Path, stage: int) -> None:
    torch.manual_seed(0)
    NanoChatForCausalLM(NanoChatConfig(**SIZES, num_key_value_heads=2)).save_pretrained(tmp_path)
    part = ModelSlice(config_of(tmp_path, stages=2), stage)
    with refuses(ConfigurationError, field="verifier.stages"):
        check_slice(part, 2)


def test_stages_of_a_model_that_can_be_split(tiny_model: Path) -> None:
    for stage in (0, 1):
        check_slice(ModelSlice(config_of(tiny_model, stages=2), stage), 2)


def test_layers_that_are_given_more_than_hidden_states(tiny_model: Path) -> None:
    part = ModelSlice(config_of(tiny_model, stages=2), 1)
    part.model.get_decoder().layers[0].register_forward_pre_hook(
        lambda _, rows, named: (rows, {**named, "per_layer_input": torch.ones(1)}), with_kwargs=True
    )
    with refuses(ConfigurationError, field="verifier.stages"):
        check_slice(part, 2)


def test_an_error_of_the_model_is_one_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    planted(monkeypatch, lambda model: setattr(model.model.norm, "forward", fail))
    monkeypatch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
    with refuses(ConfigurationError, field="LlamaForCausalLM") as refused:
        TransformersTarget(config_of(tiny_model))
    assert "\n" not in str(refused.value)


def test_rows_that_depend_on_their_pass_are_noticed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TransformersTarget(config_of(tiny_model)).exact

    def shift(model: PreTrainedModel) -> None:
        model.model.norm.register_forward_hook(lambda _, __, made: made * (1 + 1e-6 * made.shape[1]))

    planted(monkeypatch, shift)
    assert not TransformersTarget(config_of(tiny_model)).exact


def test_where_transformers_own_attentions_differ_the_exact_one_counts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    FalconForCausalLM(FalconConfig(**sizes, alibi=True)).save_pretrained(tmp_path)
    check_slice(ModelSlice(config_of(tmp_path), 0))
