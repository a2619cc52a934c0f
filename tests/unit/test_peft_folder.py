"""LoRA adapters in PEFT's format: what is read of them, and what is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model_files.peft_config import read_peft_config
from services.verifier.loading.peft_folder import read_adapter
from speculation.errors import ConfigurationError
from tests.lora import CONFIG, WEIGHTS, make_adapter, read_config, write_config
from tests.refusals import refuses

LAYER = "model.layers.0.self_attn"
SIZES = {
    f"model.layers.{layer}.self_attn.{name}": (64, outputs)
    for layer in range(2)
    for name, outputs in (("q_proj", 64), ("v_proj", 32))
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of ``SIZES``, with rank 4."""
    made = tmp_path / "adapter"
    made.mkdir()
    tensors = {}
    for name, (inputs, outputs) in SIZES.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(4, inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(outputs, 4)
    save_file(tensors, made / WEIGHTS)
    write_config(
        made, {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "v_proj"]}
    )
    return made


def change(folder: Path, **fields: Any) -> None:
    write_config(folder, {**read_config(folder), **fields})


def test_products_are_scaled_by_rank_and_alpha_of_each_module(folder: Path) -> None:
    change(folder, alpha_pattern={"layers.0.self_attn.q_proj": 2, "v_proj": 6})
    products = read_adapter(folder, SIZES).products
    assert products.keys() == SIZES.keys()
    assert products[f"{LAYER}.q_proj"].scale == 0.5
    assert products["model.layers.1.self_attn.q_proj"].scale == 2.0
    assert products[f"{LAYER}.v_proj"].scale == 1.5
    change(folder, use_rslora=True, alpha_pattern={})
    assert read_adapter(folder, SIZES).products[f"{LAYER}.q_proj"].scale == 8 / math.sqrt(4)


def test_ranks_that_differ_by_layer(tiny_model: Path, tmp_path: Path) -> None:
    ranks = {"model.layers.1.self_attn.q_proj": 9}
    made = make_adapter(tmp_path / "made", tiny_model, ranks=ranks, targets=("q_proj",))
    config = read_peft_config(made)
    assert (config.rank_of("model.layers.1.self_attn.q_proj"), config.rank_of(f"{LAYER}.q_proj")) == (9, 4)


def test_the_digest_is_of_weights_and_of_configuration(folder: Path) -> None:
    first = read_adapter(folder, SIZES).digest
    assert read_adapter(folder, SIZES).digest == first
    change(folder, lora_alpha=9)
    second = read_adapter(folder, SIZES).digest
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{LAYER}.q_proj.lora_A.weight"][0, 0] = 2
    save_file(tensors, folder / WEIGHTS)
    assert len({first, second, read_adapter(folder, SIZES).digest}) == 3


@pytest.mark.parametrize(
    "targets",
    [r".*self_attn\.(q|v)_proj", "all-linear", ["q_proj", "self_attn.v_proj"], None],
    ids=["a regular expression", "all linear", "ends of names", "not told"],
)
def test_forms_of_target_modules(folder: Path, targets: object) -> None:
    change(folder, target_modules=targets)
    assert len(read_adapter(folder, SIZES).products) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"exclude_modules": r".*\.0\..*"},
    ],
)
def test_layers_that_are_left_out(folder: Path, fields: dict[str, Any]) -> None:
    tensors = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if ".layers.1." in name}
    save_file(tensors, folder / WEIGHTS)
    with refuses(ConfigurationError, folder):
        read_adapter(folder, SIZES)
    change(folder, **fields)
    assert len(read_adapter(folder, SIZES).products) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("alora_invocation_tokens", [1]),
        ("target_parameters", ["experts.down_proj"]),
        ("trainable_token_indices", [3]),
        ("r", 257),
        ("r", 0),
        ("r", "many"),
        ("lora_alpha", math.nan),
        ("use_rslora", "yes"),
        ("rank_pattern", [4]),
        ("rank_pattern", {"q_proj": 1000}),
        ("alpha_pattern", {"(": 3}),
        ("target_modules", "(q_proj"),
        ("target_modules", [3]),
        ("layers_to_transform", ["first"]),
        ("a_field_of_next_year", 1),
    ],
)
def test_what_a_configuration_may_not_ask_for(folder: Path, field: str, value: object) -> None:
    change(folder, **{field: value})
    with refuses(ConfigurationError, field):
        read_peft_config(folder)


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damaged(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damaged


def _name(part: str) -> str:
    return f"base_model.model.{LAYER}.q_proj.lora_{part}.weight"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
        (lambda folder: (folder / CONFIG).unlink(), CONFIG),
        (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]), "cut off"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "empty"),
        (_tensors(lambda t: t.pop(_name("B"))), _name("B")),
        (_tensors(lambda t: (t.pop(_name("A")), t.pop(_name("B")))), f"{LAYER}.q_proj"),
        (_tensors(lambda t: t.update({_name("A"): torch.full((4, 64), math.nan)})), "NaN"),
        (_tensors(lambda t: t.update({_name("A"): torch.ones(4, 64, dtype=torch.int32)})), "int32"),
        (_tensors(lambda t: t.update({_name("A"): torch.ones(5, 64)})), "rank 4"),
        (_tensors(lambda t: t.update({_name("A"): torch.ones(4, 63)})), "64 inputs"),
        (_tensors(lambda t: t.update({_name("B"): torch.ones(65, 4)})), "64 outputs"),
        (_tensors(lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)})), "lm_head"),
        (_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)})), "embed_tokens"),
        (_tensors(lambda t: t.update({f"base_model.model.{LAYER}.q_proj.lora_magnitude_vector": torch.ones(64)})), "magnitude"),
        (
            _tensors(
                lambda t: t.update(
                    {_name(part).replace("q_proj", "other"): torch.ones(4, 4) for part in "AB"}
                )
            ),
            f"{LAYER}.other",
        ),
    ],
)  # fmt: skip
def test_files_that_are_not_of_this_model(folder: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(folder)
    with refuses(ConfigurationError, says=named):
        read_adapter(folder, SIZES)
