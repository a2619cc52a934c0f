"""LoRA adapters in PEFT's format: what is read of them, and what is refused by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model_files.peft_config import read_peft_config
from services.verifier.loading.peft_folder import AdaptableLayer, StoredAdapter, read_adapter
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models.lora import CONFIG, WEIGHTS, make_adapter, read_config, write_config

LAYER = "model.layers.0.self_attn"
LAYERS = {
    f"model.layers.{layer}.self_attn.{name}": AdaptableLayer(inputs=64, outputs=outputs)
    for layer in range(2)
    for name, outputs in (("q_proj", 64), ("v_proj", 32))
}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
WITH_ENDS = LAYERS | {
    EMBEDDING: AdaptableLayer(inputs=9, outputs=64, is_embedding=True),
    HEAD: AdaptableLayer(inputs=64, outputs=9, tied_to=EMBEDDING),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter of ``LAYERS``, with rank 4."""
    made = tmp_path / "adapter"
    made.mkdir()
    tensors = {}
    for name, layer in LAYERS.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(4, layer.inputs)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(layer.outputs, 4)
    save_file(tensors, made / WEIGHTS)
    write_config(
        made, {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj", "v_proj"]}
    )
    return made


def read(folder: Path, layers: Mapping[str, AdaptableLayer] = LAYERS) -> StoredAdapter:
    """The adapter, for a model beside it."""
    return read_adapter(folder, layers, folder.parent / "model")


def change(folder: Path, **fields: Any) -> None:
    write_config(folder, {**read_config(folder), **fields})


def test_products_are_scaled_by_rank_and_alpha_of_each_module(folder: Path) -> None:
    change(folder, alpha_pattern={"layers.0.self_attn.q_proj": 2, "v_proj": 6})
    products = read(folder).products
    assert products.keys() == LAYERS.keys()
    assert products[f"{LAYER}.q_proj"].scale == 0.5
    assert products["model.layers.1.self_attn.q_proj"].scale == 2.0
    assert products[f"{LAYER}.v_proj"].scale == 1.5
    change(folder, use_rslora=True, alpha_pattern={})
    assert read(folder).products[f"{LAYER}.q_proj"].scale == 8 / math.sqrt(4)


def test_ranks_that_differ_by_layer(tiny_model: Path, tmp_path: Path) -> None:
    ranks = {"model.layers.1.self_attn.q_proj": 9}
    made = make_adapter(tmp_path / "made", tiny_model, ranks=ranks, targets=("q_proj",))
    config = read_peft_config(made)
    assert (config.rank_of("model.layers.1.self_attn.q_proj"), config.rank_of(f"{LAYER}.q_proj")) == (9, 4)


def test_the_digest_is_of_weights_and_of_configuration(folder: Path) -> None:
    first = read(folder).digest
    assert read(folder).digest == first
    change(folder, lora_alpha=9)
    second = read(folder).digest
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{LAYER}.q_proj.lora_A.weight"][0, 0] = 2
    save_file(tensors, folder / WEIGHTS)
    assert len({first, second, read(folder).digest}) == 3


@pytest.mark.parametrize(
    "targets",
    [r".*self_attn\.(q|v)_proj", "all-linear", ["q_proj", "self_attn.v_proj"], None],
    ids=["a regular expression", "all linear", "ends of names", "not told"],
)
def test_forms_of_target_modules(folder: Path, targets: object) -> None:
    change(folder, target_modules=targets)
    assert len(read(folder).products) == 4


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
        read(folder)
    change(folder, **fields)
    assert len(read(folder).products) == 2


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
        (_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)})), "lora_embedding_B"),
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
        read(folder)


def with_embedding(folder: Path, *, head: bool = False, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """The embedding's product, and the output layer's as PEFT ties it, put into the adapter's file beside ``others``."""
    generator = torch.Generator().manual_seed(1)
    columns, up = torch.randn(4, 9, generator=generator), torch.randn(64, 4, generator=generator)
    prefix = f"base_model.model.{EMBEDDING}.lora_embedding_"
    made = {f"{prefix}A": columns, f"{prefix}B": up}
    if head:
        made |= {
            f"base_model.model.{HEAD}.lora_{part}.weight": each.T.contiguous() for part, each in (("A", up), ("B", columns))
        }
    save_file({**load_file(folder / WEIGHTS), **made, **others}, folder / WEIGHTS)
    return made


def test_products_of_the_embedding_and_the_output_layer(folder: Path) -> None:
    with_embedding(folder, head=True)
    change(folder, alpha_pattern={"embed_tokens": 2})
    products = read(folder, WITH_ENDS).products
    assert products.keys() == WITH_ENDS.keys()
    assert (products[EMBEDDING].scale, products[HEAD].scale) == (0.5, 2.0)
    assert (products[EMBEDDING].down.shape, products[HEAD].up.shape) == ((4, 9), (9, 4))


def test_an_embedding_has_no_product_of_a_linear_layer(folder: Path) -> None:
    with_embedding(folder)
    with refuses(ConfigurationError, says="no embedding"):
        read(folder, {**WITH_ENDS, EMBEDDING: AdaptableLayer(inputs=9, outputs=64)})


def test_what_target_modules_names_of_the_embedding_is_missed(folder: Path) -> None:
    change(folder, target_modules=["q_proj", "v_proj", "embed_tokens"])
    with refuses(ConfigurationError, says=f"names {EMBEDDING}"):
        read(folder, WITH_ENDS)


@pytest.mark.parametrize("tied", [True, False])
def test_a_product_that_is_tied_is_in_the_file(folder: Path, tied: bool) -> None:
    with_embedding(folder, head=tied)
    read(folder, WITH_ENDS)
    change(folder, ensure_weight_tying=True)
    if tied:
        assert HEAD in read(folder, WITH_ENDS).products
        tensors = load_file(folder / WEIGHTS)
        tensors[f"base_model.model.{HEAD}.lora_B.weight"][3, 2] += 1
        save_file(tensors, folder / WEIGHTS)
    with refuses(ConfigurationError, "ensure_weight_tying"):
        read(folder, WITH_ENDS)


@pytest.mark.parametrize("module", [EMBEDDING, HEAD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_weight_in_the_file_is_the_served_one(folder: Path, module: str, dtype: torch.dtype) -> None:
    """PEFT writes it beside the product of an embedding or an output layer, and would put it in the model's place."""
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(2))
    (folder.parent / "model").mkdir()
    save_file({f"{EMBEDDING}.weight": weight}, folder.parent / "model" / "model.safetensors")
    name = f"base_model.model.{module}.base_layer.weight"
    with_embedding(folder, head=True, **{name: weight.to(dtype)})
    assert read(folder, WITH_ENDS).products.keys() == WITH_ENDS.keys()
    changed = weight.to(dtype)
    changed[8, 63] += 1
    for other in (changed, weight[:8].to(dtype).clone()):
        with_embedding(folder, head=True, **{name: other})
        with refuses(ConfigurationError, f"the tensor {name}"):
            read(folder, WITH_ENDS)
