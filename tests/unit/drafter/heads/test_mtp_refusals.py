"""An MTP layer that cannot be served exactly as it was trained, or not for this target, is refused: field, value, allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.gemma2 import modeling_gemma2 as gemma2

from cluster.models.drafters import draft_models
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.drafter.heads.files.kinds import inspect
from services.drafter.heads.mtp.block import ATTENTION, DecoderBlock
from services.drafter.heads.mtp.files import load_mtp
from services.model_files.weights.headers import read_shapes
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models import mtp_layers as made
from tests.tiny_models.head_checkpoints import HIDDEN, HeadCheckpoint, numbers

FIRST = f"model.layers.{made.LAYERS}."


@dataclass
class Beside:
    """The MTP layer of a target, in a folder of its own."""

    target: Path
    folder: Path

    def change(self, change: Callable[[HeadCheckpoint], object]) -> None:
        config = json.loads((self.folder / "config.json").read_text())
        checkpoint = HeadCheckpoint(config, load_file(self.folder / "model.safetensors"))
        change(checkpoint)
        checkpoint.write(self.folder)


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    target = made.make_target(tmp_path / "target")
    return Beside(target, made.alone(target, tmp_path / "layer"))


def config(**fields: Any) -> Callable[[HeadCheckpoint], None]:
    return lambda checkpoint: checkpoint.config.update(fields)


def tensor(name: str, value: torch.Tensor | None) -> Callable[[HeadCheckpoint], None]:
    def change(checkpoint: HeadCheckpoint) -> None:
        if value is None:
            del checkpoint.tensors[FIRST + name]
        else:
            checkpoint.tensors[FIRST + name] = value

    return change


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (tensor("enorm.weight", None), (f"the tensor {FIRST}enorm.weight", "missing")),
        (tensor("shared_head.norm.weight", None), (f"the tensor {FIRST}shared_head.norm.weight", "missing")),
        (tensor("self_attn.o_proj.weight", None), (f"the tensor {FIRST}self_attn.o_proj.weight", "missing")),
        (tensor("self_attn.z.weight", numbers(4, 4)), (f"the tensor {FIRST}self_attn.z.weight", "unknown")),
        (
            tensor("mlp.up_proj.weight", numbers(4, 4)),
            (f"the tensor {FIRST}mlp.up_proj.weight", "[4, 4]", "must be [96, 64]"),
        ),
        (tensor("eh_proj.weight", numbers(64, 192)), (f"the tensor {FIRST}eh_proj.weight", "[64, 192]", "be [64, 128]")),
        (
            tensor("self_attn.attention_sink_bias", numbers(4)),
            (f"the tensor {FIRST}self_attn.attention_sink_bias", "an attention sink"),
        ),
        (tensor("hnorm.weight", numbers(32)), (f"the tensor {FIRST}hnorm.weight", "[32]")),
        (tensor("shared_head.norm.weight", numbers(32)), (f"the tensor {FIRST}shared_head.norm.weight", "[32]")),
        (tensor("eh_proj.bias", numbers(64)), (f"the tensor {FIRST}eh_proj.bias", "unknown")),
        (
            tensor("mlp.up_proj.weight", torch.full((96, 64), torch.nan)),
            (f"the tensor {FIRST}mlp.up_proj.weight", "infinite values or NaN"),
        ),
        (
            tensor("embed_tokens.weight", numbers(320, HIDDEN)),
            (f"the tensor {FIRST}embed_tokens.weight", "another than the target's"),
        ),
        (
            tensor("shared_head.head.weight", numbers(320, HIDDEN)),
            (f"the tensor {FIRST}shared_head.head.weight", "another than the target's"),
        ),
        (config(num_nextn_predict_layers=2), ("num_nextn_predict_layers", 2, "must be 1")),
        (config(hidden_size=32), ("hidden_size", 32)),
        (config(vocab_size=999), ("vocab_size", 999)),
        (config(mtp_use_dedicated_embeddings=True), ("mtp_use_dedicated_embeddings", "true")),
        (config(chain_mtp_hidden_states="yes"), ("chain_mtp_hidden_states", "yes")),
        (config(mtp_hidden_states_first="yes"), ("mtp_hidden_states_first", "yes")),
        (config(norm_output="yes"), ("norm_output", "yes")),
        (config(accept_lenience=1.5), ("accept_lenience", "1.5")),
        (config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), ("rope_type", "dynamic")),
        (config(model_type="mish"), ("model_type", "mish")),
        (config(model_type="gpt2"), ("layer", None, "GPT2LMHeadModel has no list of layers with rotary")),
    ],
)
def test_they_are_refused_by_name(
    beside: Beside, change: Callable[[HeadCheckpoint], object], refusal: tuple[object, ...]
) -> None:
    load_mtp(beside.folder, beside.target)
    beside.change(change)
    with refuses(ConfigurationError, *refusal) as refused:
        load_mtp(beside.folder, beside.target)
    assert "\n" not in str(refused.value)


def further(number: int, **changes: torch.Tensor) -> Callable[[HeadCheckpoint], None]:
    """A copy of the layer under another number, with some tensors changed."""

    def change(checkpoint: HeadCheckpoint) -> None:
        copied = {name.removeprefix(FIRST): each.clone() for name, each in checkpoint.tensors.items()}
        changed = {name.replace("__", "."): each for name, each in changes.items()}
        checkpoint.tensors.update({f"model.layers.{number}.{name}": each for name, each in {**copied, **changed}.items()})
        checkpoint.config["num_nextn_predict_layers"] = 2

    return change


def test_numbers_with_a_gap_are_refused(beside: Beside) -> None:
    beside.change(further(9))
    for refused in (load_mtp, inspect):
        with refuses(ConfigurationError, "the numbering of its MTP layers", [2, 9], "without a gap"):
            refused(beside.folder, beside.target)


def test_a_fault_of_a_further_layer_is_refused(beside: Beside) -> None:
    beside.change(further(3, enorm__weight=numbers(32)))
    with refuses(ConfigurationError, "the tensor model.layers.3.enorm.weight", [32]):
        load_mtp(beside.folder, beside.target)


@pytest.mark.parametrize("layout", ["qwen", "ernie"])
def test_several_layers_are_refused_where_no_checkpoint_says_what_they_read(tmp_path: Path, layout: str) -> None:
    target = made.chain(made.make_target(tmp_path), [made.dense_layer(), made.dense_layer()], layout)
    with refuses(ConfigurationError, "num_nextn_predict_layers", 2, f"several layers of layout {layout} read is not known"):
        load_mtp(target, target)


def test_embeddings_and_output_rows_of_the_target_may_come_along(beside: Beside) -> None:
    rows = load_file(beside.target / "model.safetensors")["model.embed_tokens.weight"]
    beside.change(tensor("embed_tokens.weight", rows.clone()))
    beside.change(tensor("shared_head.head.weight", rows.clone()))
    load_mtp(beside.folder, beside.target)
    # They are in memory already.
    shapes = read_shapes(beside.folder)
    counted = sum(torch.Size(shape).numel() for name, shape in shapes.items() if len(shape) < 2 or shape[0] != len(rows))
    assert inspect(beside.folder, beside.target).numbers == counted + rows.numel()


def test_attention_that_is_not_implemented_is_refused() -> None:
    config = gemma2.Gemma2Config(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1
    )
    config._attn_implementation = ATTENTION
    layer, rotary = gemma2.Gemma2DecoderLayer(config, 0), gemma2.Gemma2RotaryEmbedding(config)
    with refuses(ConfigurationError, "softcap of Gemma2Attention in an MTP layer", 50.0):
        DecoderBlock(layer, rotary, HIDDEN, "layer")
    mlp = gemma2.Gemma2MLP(config)
    with refuses(ConfigurationError, "layer", says="Gemma2MLP: "):
        DecoderBlock(mlp, rotary, HIDDEN, "layer")
    mlp.forward = lambda rows, **others: rows
    with refuses(ConfigurationError, "layer", says="Gemma2MLP does not attend"):
        DecoderBlock(mlp, rotary, HIDDEN, "layer")


def found(target: Path, *flags: str) -> dict[str, tuple[int, ...]]:
    settings = load(flags=[f"model={target}", "server.port=0", *flags], environ={})
    models = draft_models(settings, ResolvedModel(name="tiny", path=target))
    return {name: each.layers for name, each in models.items()}


def test_the_targets_own_layer_drafts_where_it_is_asked_for(tmp_path: Path) -> None:
    target = made.make_target(tmp_path / "target")
    whole = made.with_mtp(target, tmp_path / "whole")
    assert found(whole) == {}
    assert found(whole, "router.strategy=mtp") == {"mtp": (-1,)}
    assert found(whole, f"drafter.models=[{whole}]") == {"mtp": (-1,)}
    # As another model's, it is a language model that drafts.
    assert found(target, f"drafter.models=[{whole}]") == {"draft_model": ()}
    with refuses(ConfigurationError, "router.strategy", "mtp", "holds no MTP layer"):
        found(target, "router.strategy=mtp")


def test_other_tensors_than_an_mtp_layers_are_refused(tmp_path: Path) -> None:
    folder = HeadCheckpoint({"speculators_model_type": "mtp"}, {"a.weight": numbers(4, 4)}).write(tmp_path)
    with refuses(ConfigurationError, "its tensors", "none of an MTP layer"):
        inspect(folder, None)


def test_a_folder_of_its_own_is_known_before_the_target_is_there(beside: Beside) -> None:
    early, known = inspect(beside.folder, None), inspect(beside.folder, beside.target)
    assert (early.source, early.layers) == (known.source, known.layers) == ("mtp", (-1,))
