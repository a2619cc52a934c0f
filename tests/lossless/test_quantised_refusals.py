"""Quantised checkpoints that stand for no numbers, or say what their files are not: refused in one line, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.verifier.config import TargetConfig
from services.verifier.loading.load_model import load_layers, load_whole
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.gpt_oss import make_gpt_oss
from tests.tiny_models.quantised import FORMS, Make, configure, each_once, make_float_model

FILE = "model.safetensors"
Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_float_model(tmp_path_factory.mktemp("float"))


@pytest.fixture(scope="module")
def made_of(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return each_once(float_model, tmp_path_factory)


def of(folder: Path, **settings: Any) -> TargetConfig:
    return TargetConfig(model_path=str(folder), **settings)


def change(folder: Path, how: Change) -> None:
    weights = load_file(folder / FILE)
    how(weights)
    save_file(weights, folder / FILE)


UP = "model.layers.1.mlp.up_proj"
STATE = "quant_state.bitsandbytes__nf4"
SCALE = f"{UP}.weight_scale"


def without(name: str) -> Change:
    def remove(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return remove


def instead(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def replace(weights: dict[str, torch.Tensor]) -> None:
        weights[name] = make(weights[name]).contiguous()

    return replace


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


# fmt: off
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "no scales": ("fp8_rows", without(SCALE), f"hold no {SCALE}_inv, without which {UP}.weight stands for no numbers"),
    "shape": ("fp8_rows", instead(SCALE, lambda scales: scales[1:]), f"{SCALE} is BF16 [159, 1]"),
    "nan": ("fp8_rows", instead(SCALE, with_nan), f"{SCALE} holds infinite values or NaN"),
    "code": ("fp8_rows", instead(f"{UP}.weight", with_nan), f"{UP}.weight holds infinite values or NaN"),
    "awq: no zeros": ("awq", without(f"{UP}.qzeros"), f"hold no {UP}.qzeros"),
    "awq: words": ("awq", instead(f"{UP}.scales", lambda scales: scales[:, 8:]), f"{UP}.scales is F16 [6, 152]"),
    "awq: nan": ("awq", instead(f"{UP}.scales", with_nan), f"{UP}.scales holds infinite values or NaN"),
    "gptq: no scales": ("gptq", without(f"{UP}.scales"), f"hold no {UP}.scales"),
    "gptq: no order": ("gptq_ordered", without(f"{UP}.g_idx"), f"hold no {UP}.g_idx"),
    "gptq: order": ("gptq", instead(f"{UP}.g_idx", lambda groups: groups + 1), f"{UP}.g_idx names groups from 1 to 6"),
    "gptq: zeros": ("gptq", instead(f"{UP}.qzeros", lambda zeros: zeros[1:]), f"{UP}.qzeros is I32 [5, 20]"),
    "gptq: words": ("gptq", instead(f"{UP}.qweight", lambda words: words.long()), f"{UP}.qweight is I64 [24, 160]"),
    "compressed: no shape": ("compressed_w4_groups", without(f"{UP}.weight_shape"), f"hold no {UP}.weight_shape"),
    "compressed: shape": (
        "compressed_w4_groups", instead(f"{UP}.weight_shape", lambda shape: shape + 8), "weight_shape says [168, 200]"
    ),
    "compressed: nan": ("compressed_w8", instead(SCALE, with_nan), f"{SCALE} holds infinite values or NaN"),
    "compressed: zeros": (
        "compressed_w4_zeros", instead(f"{UP}.weight_zero_point", lambda zeros: zeros[:, 1:]), "weight_zero_point is I32 [20, 5]"
    ),
    "nvfp4: whole": ("compressed_nvfp4", without(f"{UP}.weight_global_scale"), f"hold no {UP}.weight_global_scale"),
    "nvfp4: scales": ("compressed_nvfp4", instead(SCALE, lambda scales: scales[1:]), f"{SCALE} is F8_E4M3 [159, 12]"),
    "nvfp4: zero": ("compressed_nvfp4", instead(f"{UP}.weight_global_scale", torch.zeros_like), "weight holds infinite"),
    "mxfp4: scales": ("compressed_mxfp4", instead(SCALE, lambda scales: scales.char()), f"{SCALE} is I8 [160, 6]"),
    "bnb: no table": ("bnb_nf4", without(f"{UP}.weight.quant_map"), f"hold no {UP}.weight.quant_map"),
    "bnb: scales": ("bnb_nf4", instead(f"{UP}.weight.absmax", lambda scales: scales[1:]), "absmax is F32 [959]"),
    "bnb: nan": ("bnb_nf4", instead(f"{UP}.weight.absmax", with_nan), "absmax holds infinite values or NaN"),
    "bnb: state": ("bnb_nf4", instead(f"{UP}.weight.{STATE}", lambda text: text[1:]), f"{UP}.weight.{STATE} is no JSON object"),
    "bnb: no state": ("bnb_nf4", without(f"{UP}.weight.{STATE}"), "up_proj.weight is stored as U8"),
    "bnb: rows": ("bnb_int8", instead(f"{UP}.SCB", lambda scales: scales[1:]), f"{UP}.SCB is F32 [159]"),
    "bnb: layout": ("bnb_int8", instead(f"{UP}.weight_format", lambda kind: kind + 1), f"{UP}.weight_format is 1"),
    "hqq: no scales": ("hqq_4_bits", without(f"{UP}.scale"), f"hold no {UP}.scale"),
    "hqq: bits": ("hqq_4_bits", instead(f"{UP}.packing", lambda text: text + 1), f"{UP}.packing is 5cju`v9"),
    "hqq: axis": ("hqq_4_bits", instead(f"{UP}.axis", lambda axis: axis + 1), f"{UP}.axis is 2"),
    "hqq: floats": ("hqq_4_bits", instead(f"{UP}.view_as_float", lambda flag: flag + 1), f"{UP}.view_as_float is 1"),
    "hqq: groups": ("hqq_4_bits", instead(f"{UP}.group_size", lambda size: size - 1), "are no groups of 31 (group_size)"),
    "hqq: shape": ("hqq_4_bits", instead(f"{UP}.shape", lambda shape: shape * 2), f"{UP}.W_q is U8 [480, 32]"),
    "hqq: no matrix": ("hqq_4_bits", instead(f"{UP}.shape", lambda shape: shape - 160), f"{UP}.shape says [0, 32]"),
    "hqq: zeros": ("hqq_4_bits", instead(f"{UP}.zero", lambda zeros: zeros[1:]), f"{UP}.zero is F16 [959, 1]"),
    "hqq: nan": ("hqq_4_bits", instead(f"{UP}.zero", with_nan), f"{UP}.zero holds infinite values or NaN"),
    "plain": ("fp8_rows", lambda weights: weights.update({k: v.float() for k, v in weights.items()}), "files hold none"),
}
# fmt: on


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage: str, made_of: Make, tmp_path: Path) -> None:
    form, how, says = DAMAGE[damage]
    folder = Path(shutil.copytree(made_of(form)[0], tmp_path / "quantised"))
    change(folder, how)
    with refuses(ConfigurationError, says=says) as caught:
        load_whole(of(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError):
        load_layers(of(folder, stages=2), range(1, 2))


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_damaged_experts_are_refused(part: str, float_model: Path, tmp_path: Path) -> None:
    folder, _ = make_gpt_oss(float_model, tmp_path)
    name = f"model.layers.1.mlp.experts.down_proj_{part}"
    change(folder, instead(name, lambda tensor: tensor[:, 1:]))
    with refuses(ConfigurationError, says="down_proj_scales is U8 [4, "):
        load_whole(of(folder))


def with_weights(**changes: object) -> dict[str, object]:
    """A configuration of compressed-tensors with other weights than its files have."""
    config: dict[str, Any] = json.loads(json.dumps(FORMS["compressed_w4_groups"].config))
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


ACTIVATIONS = {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": True}}
FIELDS: tuple[tuple[str, dict[str, object], str, object], ...] = (
    ("fp8_rows", {"quant_method": "quanto"}, "quantization_config.quant_method", "quanto"),
    ("fp8_rows", {"quant_method": {"a": 1}}, "quantization_config.quant_method", "{'a': 1}"),
    ("fp8_rows", {"bits": 4}, "quantization_config.quant_method", "null"),
    ("fp8_rows", {"quant_method": "fp8", "activation_scheme": "none"}, "quantization_config.activation_scheme", "none"),
    ("fp8_rows", {"quant_method": "fp8", "fmt": "e3m4"}, "quantization_config.fmt", "e3m4"),
    ("fp8_rows", {"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size", "[128]"),
    ("awq", {"quant_method": "awq", "bits": 4, "version": "gemv"}, "quantization_config.version", "gemv"),
    ("awq", {"quant_method": "awq", "w_bit": 8}, "quantization_config.w_bit", "8"),
    ("awq", {"quant_method": "awq", "zero_point": False}, "quantization_config.zero_point", "false"),
    ("gptq", {"quant_method": "gptq", "bits": "4"}, "quantization_config.bits", "4"),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 0}, "quantization_config.group_size", "0"),
    (
        "gptq",
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "quantization_config.checkpoint_format",
        "marlin",
    ),
    ("gptq", {"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "quantization_config.dynamic", "{'-:x': {}}"),
    ("gptq", {"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "quantization_config.desc_act", "yes"),
    # Fields that contradict the tensors.
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 48}, "quantised", ""),
    ("gptq", {"quant_method": "gptq", "bits": 8, "group_size": 32}, "quantised", ""),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 56}, "quantised", ""),
    ("compressed_w4_groups", with_weights(group_size=64), "quantised", ""),
    ("compressed_w4_groups", with_weights(symmetric=False), "quantised", ""),
    ("compressed_w4_groups", with_weights(num_bits=8), "quantised", ""),
    ("compressed_w4_groups", {**with_weights(), "ignore": ["re:.*up_proj"]}, "quantised", ""),
    (
        "compressed_w4_groups",
        with_weights(strategy="block"),
        "quantization_config.config_groups.group_0.weights.strategy",
        "block",
    ),
    (
        "compressed_w8",
        {"quant_method": "compressed-tensors", "config_groups": {"a": ACTIVATIONS}},
        "quantization_config.config_groups.a.input_activations.strategy",
        "null",
    ),
    ("compressed_w8", {"quant_method": "compressed-tensors"}, "quantization_config.config_groups", "null"),
    (
        "compressed_w8",
        {"quant_method": "compressed-tensors", "config_groups": {}, "format": "marlin-24"},
        "quantization_config.format",
        "marlin-24",
    ),
)


@pytest.mark.parametrize(("form", "config", "field", "value"), FIELDS, ids=lambda one: str(one)[-40:])
def test_fields_are_checked(
    form: str, config: dict[str, object], field: str, value: object, made_of: Make, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made_of(form)[0], tmp_path / "quantised"))
    configure(folder, quantization_config=config)
    with refuses(ConfigurationError, field, value):
        load_whole(of(folder))
