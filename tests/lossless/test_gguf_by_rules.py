"""GGUF files that transformers reads by rules (Qwen3.5-MoE): blocks are kept, heads and inputs in their other order, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.models.target import resolve
from services.model_files.weights.files import BLOCKS_FILE, WeightFiles
from services.model_files.weights.stored_blocks import KEPT, StoredBlocks, stored_as
from services.verifier.checks.exactness import is_exact
from services.verifier.config import TargetConfig
from services.verifier.kernels.exact_weights import ExactWeight
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.loading.load_model import load_whole
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_quantised import logits, of
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.tiny_gguf import _add, _describe, _written

HIDDEN, LAYERS, HEADS, KV_HEADS, SIZE = 256, 4, 4, 2, 64
# Of the gated delta rule: keys and values.
KEYS, VALUES, KEY_SIZE, VALUE_SIZE, CONVOLVED = 2, 8, 32, 32, 4
EXPERTS, WIDTH = 4, 256
ROWS = 2 * KEYS * KEY_SIZE + VALUES * VALUE_SIZE
KINDS = {
    "_norm": "F32", "ssm_a": "F32", "ssm_dt": "F32", "conv1d": "F32", "inp": "F32", "ssm_norm": "F32", "ssm_alpha": "F32",
    "ssm_beta": "F32", "ssm_out": "Q4_K", "attn_qkv": "Q5_K", "down_exps": "Q6_K", "_exps": "Q4_K", "ffn_down": "Q3_K",
    "ffn": "Q8_0", "attn": "Q4_0", "token_embd": "Q6_K",
}  # fmt: skip


def shapes_of(layer: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors, by llama.cpp's names; every second one attends."""
    if layer % 2:
        own: dict[str, tuple[int, ...]] = {
            "attn_q.weight": (2 * HEADS * SIZE, HIDDEN), "attn_k.weight": (KV_HEADS * SIZE, HIDDEN),
            "attn_v.weight": (KV_HEADS * SIZE, HIDDEN), "attn_output.weight": (HIDDEN, HEADS * SIZE),
            "attn_q_norm.weight": (SIZE,), "attn_k_norm.weight": (SIZE,),
        }  # fmt: skip
    else:
        own = {
            "attn_qkv.weight": (ROWS, HIDDEN), "attn_gate.weight": (VALUES * VALUE_SIZE, HIDDEN),
            "ssm_alpha.weight": (VALUES, HIDDEN), "ssm_beta.weight": (VALUES, HIDDEN), "ssm_conv1d.weight": (ROWS, CONVOLVED),
            "ssm_norm.weight": (VALUE_SIZE,), "ssm_out.weight": (HIDDEN, VALUES * VALUE_SIZE), "ssm_a": (VALUES,),
            "ssm_dt.bias": (VALUES,),
        }  # fmt: skip
    mixed: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp.weight": (EXPERTS, HIDDEN), "ffn_gate_exps.weight": (EXPERTS, WIDTH, HIDDEN),
        "ffn_up_exps.weight": (EXPERTS, WIDTH, HIDDEN), "ffn_down_exps.weight": (EXPERTS, HIDDEN, WIDTH),
        "ffn_gate_inp_shexp.weight": (HIDDEN,), "ffn_gate_shexp.weight": (WIDTH, HIDDEN),
        "ffn_up_shexp.weight": (WIDTH, HIDDEN), "ffn_down_shexp.weight": (HIDDEN, WIDTH),
        "attn_norm.weight": (HIDDEN,), "post_attention_norm.weight": (HIDDEN,),
    }  # fmt: skip
    return {f"blk.{layer}.{name}": shape for name, shape in {**own, **mixed}.items()}


def make_tiny_qwen35moe(folder: Path, kinds: Mapping[str, str]) -> Path:
    source = make_tiny_model(folder / "source", hidden_size=HIDDEN, num_hidden_layers=LAYERS)
    known = AutoModelForCausalLM.from_pretrained(source).config
    writer = GGUFWriter(folder / "tiny.gguf", "qwen35moe")
    known.num_attention_heads, known.num_key_value_heads = HEADS, KV_HEADS
    _describe(writer, known, json.loads((source / "tokenizer.json").read_text()))
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_rope_dimension_count(SIZE // 2)
    writer.add_rope_dimension_sections([8, 4, 4, 0])
    writer.add_full_attention_interval(2)
    writer.add_ssm_conv_kernel(CONVOLVED)
    writer.add_ssm_state_size(KEY_SIZE)
    writer.add_ssm_group_count(KEYS)
    writer.add_ssm_time_step_rank(VALUES)
    writer.add_ssm_inner_size(VALUES * VALUE_SIZE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_expert_shared_feed_forward_length(WIDTH)
    shapes = {"token_embd.weight": (known.vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    drawn = torch.Generator().manual_seed(0)
    for name, shape in {**shapes, **{k: v for layer in range(LAYERS) for k, v in shapes_of(layer).items()}}.items():
        made = torch.randn(shape, generator=drawn) / 16
        if "norm" in name:
            made += 1
        elif name.endswith("ssm_a"):
            made = -made.abs() - 0.5
        _add(writer, name, made.numpy(), kinds)
    return _written(writer, folder / "tiny.gguf")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    gguf = make_tiny_qwen35moe(folder, KINDS)
    told: list[str] = []
    found = resolve(str(gguf), folder / "cache", say=told.append).path
    assert not any("float32" in line for line in told)
    return gguf, found


def test_the_numbers_are_those_that_transformers_makes_of_the_file(unpacked: tuple[Path, Path]) -> None:
    gguf, folder = unpacked
    theirs = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32).state_dict()
    ours = load_whole(TargetConfig(model_path=str(folder), weights="float32")).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


def test_blocks_are_kept(unpacked: tuple[Path, Path]) -> None:
    _, folder = unpacked
    with WeightFiles(folder) as files:
        kinds = {name: files.kind(name) for name in files.names if len(files.shape(name)) > 1}
        moved = files.get("model.layers.0.linear_attn.out_proj.weight")
        assert isinstance(moved, StoredBlocks) and moved.order is not None
        # By whole heads of values, which transformers has grouped by those of keys.
        assert torch.equal(moved.order.view(VALUES, VALUE_SIZE) % VALUE_SIZE, torch.arange(VALUE_SIZE).expand(VALUES, -1))
        assert stored_as(files.get("model.layers.1.mlp.shared_expert.down_proj.weight")) == "Q3_K"
        assert files.reordered
    kept = {name for name, kind in kinds.items() if kind in KEPT}
    assert kept == {name for name in kinds if name.endswith(("_proj.weight", "_proj", "in_proj_z.weight", "in_proj_qkv.weight",
                                                            "embed_tokens.weight"))}  # fmt: skip


@needs_kernels
def test_layers_multiply_by_them(unpacked: tuple[Path, Path]) -> None:
    _, folder = unpacked
    made = logits(folder, weights="as_stored")
    torch.testing.assert_close(made, logits(folder, weights="float32"), rtol=1e-3, atol=1e-3)
    target = TransformersTarget(of(folder, weights="as_stored"))
    model = target._part.model
    experts = model.get_decoder().layers[0].mlp.experts
    assert {one.stored_as for one in experts.gate_up_proj.numbers.packed} == {"Q4_K"}
    assert isinstance(experts.down_proj, ExactWeight)
    held = [one for one in model.modules() if isinstance(one, NativeLinear) and one.order is not None]
    assert len(held) == LAYERS // 2
    assert is_exact(target)
    size = shape_of(TargetConfig(model_path=str(folder)))
    assert size.kept_bytes is not None and size.kept_bytes < 1.1


def _without_order(metadata: dict[str, str]) -> dict[str, str]:
    return {**metadata, "orders": json.dumps({name: order[1:] for name, order in json.loads(metadata["orders"]).items()})}


def _twice(metadata: dict[str, str]) -> dict[str, str]:
    return {**metadata, "orders": metadata["orders"].replace("[0, 1,", "[1, 1,")}


@pytest.mark.parametrize("damage", [_without_order, _twice])
def test_a_damaged_order_is_refused(
    damage: Callable[[dict[str, str]], dict[str, str]], unpacked: tuple[Path, Path], tmp_path: Path
) -> None:
    for file in unpacked[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with safe_open(unpacked[1] / BLOCKS_FILE, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(unpacked[1] / BLOCKS_FILE), tmp_path / BLOCKS_FILE, metadata=damage(metadata))
    with refuses(ConfigurationError, says="the order of the inputs of model.layers."):
        load_whole(TargetConfig(model_path=str(tmp_path)))


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    gguf = make_tiny_qwen35moe(tmp_path, {**KINDS, "blk.2.ssm_out": "F32"})
    # Layer 2 becomes one that there is not.
    data = gguf.read_bytes().replace(b"blk.2.ssm_out.weight", b"blk.2.ssm_0ut.weight")
    gguf.write_bytes(data)
    with refuses(ConfigurationError, says="hold no model.layers.2.linear_attn.out_proj.weight") as caught:
        resolve(str(gguf), tmp_path / "cache")
    assert "\n" not in str(caught.value)
