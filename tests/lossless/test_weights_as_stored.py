"""Weights kept as a file stores them: the numbers that transformers makes of the file, the same bits, the same tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from cluster.models.target import as_float32, resolve
from services.model_files.generation_config import read_generation_config
from services.model_files.weights.files import BLOCKS_FILE
from services.model_files.weights.stored_blocks import KEPT, StoredLinear, halves_of, sizes_of
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.linear_kernel import NativeLinear
from services.verifier.loading.gguf_blocks import READ
from services.verifier.loading.load_model import hollow_model, load_whole
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.kernels.kernels_here import SETS, all_here, kernels_of
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.tiny_gguf import ALIKE, DRAWN, FEW_BITS, Q4_K_M, WIDE, make_tiny_gguf

MIXED = {
    "attn_norm": "F32",
    "ffn_norm": "F32",
    "attn_q": "Q4_1",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "Q4_0",
    "ffn": "Q4_1",
    "token_embd": "Q8_0",
}
TEXT = tuple(range(5, 45))


def logits(model: Path, **settings: str) -> tuple[torch.Tensor, TransformersTarget]:
    """Of a prompt, then of a tree behind it."""
    target = TransformersTarget(
        TargetConfig(model_path=str(model), kv_cache_tokens=512, **settings)  # type: ignore[arg-type]
    )
    target.open("a", 200)
    made = target.forward([Rows(request_id="a", context=0, tokens=TEXT, logits=len(TEXT))])[0]
    target.keep("a", 0, range(len(TEXT)))
    tree = Rows(request_id="a", context=len(TEXT), tokens=(7, 8, 9, 10, 11), parents=(-1, 0, -1, 2), logits=5)
    return torch.cat([made, target.forward([tree])[0]]), target


@pytest.fixture(scope="module", params=[MIXED, ALIKE, Q4_K_M, FEW_BITS], ids=["mixed", "alike", "q4_k_m", "few"])
def unpacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF file and the folder that was made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    wide = WIDE if request.param in (Q4_K_M, FEW_BITS) else {}
    gguf = make_tiny_gguf(folder, request.param, **wide)
    return gguf, resolve(str(gguf), folder / "cache").path


def test_the_folder_holds_what_transformers_makes_of_the_file(unpacked: tuple[Path, Path]) -> None:
    gguf, folder = unpacked
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    theirs = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    ours = load_whole(TargetConfig(model_path=str(folder), weights="float32")).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    assert (
        AutoTokenizer.from_pretrained(folder)("naïve fox 🙂").input_ids
        == AutoTokenizer.from_pretrained(**source)("naïve fox 🙂").input_ids
    )
    # In blocks, not unpacked.
    assert (folder / BLOCKS_FILE).stat().st_size < sum(weight.numel() for weight in theirs.values()) * 2


def test_the_end_of_a_turn_ends_answers(unpacked: tuple[Path, Path]) -> None:
    assert read_generation_config(unpacked[1]).eos_token_ids == {0, 1}


@pytest.mark.parametrize("instructions", SETS)
def test_as_stored_and_as_float32_are_the_same_bits(unpacked: tuple[Path, Path], instructions: str) -> None:
    kernels_of(instructions)
    _, folder = unpacked
    stored, target = logits(folder, weights="as_stored", kernels=instructions)
    assert target.kernels.weights == "as_stored"
    assert target.weights.stored.startswith("GGUF, ")
    assert {target.weights.stored.split(", ")[1], target.weights.multiplied[0]} <= set(KEPT)
    floats, other = logits(folder, weights="float32", kernels=instructions)
    assert other.kernels.weights == "float32"
    assert other.weights == replace(target.weights, multiplied=("float32",))
    assert torch.equal(stored, floats)
    reference = AutoModelForCausalLM.from_pretrained(as_float32(folder), dtype=torch.float32)(torch.tensor([TEXT])).logits[0]
    assert torch.allclose(stored[: len(TEXT)], reference, atol=2e-4)
    assert torch.equal(stored[: len(TEXT)].argmax(-1), reference.argmax(-1))


def test_every_instruction_set_computes_the_same_bits(unpacked: tuple[Path, Path]) -> None:
    _, folder = unpacked
    made = [logits(folder, kernels=here.name)[0] for here in all_here()]
    assert all(torch.equal(one, made[0]) for one in made)


def test_memory_is_near_the_files_and_the_plan_knows_it(unpacked: tuple[Path, Path]) -> None:
    if (kernels := library()) is None:
        pytest.skip("no C compiler here")
    config = TargetConfig(model_path=str(unpacked[1]))
    linears = [module.weight for module in load_whole(config).modules() if isinstance(module, StoredLinear)]
    raw = sum(weight.raw.numel() for weight in linears)
    packed = sum(NativeLinear(kernels, weight, None)._weight.numel() for weight in linears)
    assert raw <= packed <= raw * 1.03
    kept = shape_of(config).kept_bytes
    numbers = sum(parameter.numel() for parameter in hollow_model(config).parameters())
    stored = sum(tensor.nbytes for tensor in load_file(unpacked[1] / BLOCKS_FILE).values())
    assert kept is not None and round(kept * numbers) == stored


def test_without_kernels_blocks_are_unpacked(unpacked: tuple[Path, Path]) -> None:
    _, folder = unpacked
    made, target = logits(folder, kernels="onednn")
    assert target.kernels.linears == "onednn"
    assert not any(isinstance(module, StoredLinear) for module in target._part.model.modules())
    assert torch.allclose(made, logits(folder)[0], atol=2e-4)


def test_bfloat16_weights_stay_two_bytes(tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C compiler here")
    folder = make_tiny_model(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    stored, target = logits(folder)
    assert target.kernels.weights == "as_stored"
    assert (target.weights.stored, target.weights.multiplied) == ("bfloat16", ("bfloat16",))
    assert torch.equal(stored, logits(folder, weights="float32")[0])


def test_every_type_is_unpacked_to_the_numbers_of_the_gguf_package(tmp_path: Path) -> None:
    """What is kept in blocks and what is not, on tensors whose rows GGUF has in the order of transformers."""
    places = ("attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    types = (*DRAWN, "Q5_0", "Q5_1", "Q8_0")
    assert set(READ) - {"Q4_0", "Q4_1"} <= set(types)
    for kinds in (types[:5], types[5:10], types[10:]):
        gguf = make_tiny_gguf(tmp_path / kinds[0], {"_norm": "F32", **dict(zip(places, kinds, strict=False))}, **WIDE)
        tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
        folder = resolve(str(gguf), tmp_path / "cache").path
        ours = load_whole(TargetConfig(model_path=str(folder), weights="float32")).state_dict()
        for place, name, kind in zip(places, names, kinds, strict=False):
            tensor = tensors[f"blk.1.{place}.weight"]
            assert tensor.tensor_type.name == kind
            expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(ours[f"model.layers.1.{name}.weight"], expected), kind


def test_types_that_are_not_kept_become_float32_and_are_told(tmp_path: Path) -> None:
    gguf = make_tiny_gguf(tmp_path, {"_norm": "F32", "ffn_up": "IQ3_S", "ffn_down": "Q4_0"}, **WIDE)
    said: list[str] = []
    folder = resolve(str(gguf), tmp_path / "cache", say=said.append).path
    assert any(f"weights of the type IQ3_S become float32: only {', '.join(READ)} are kept" in line for line in said)
    kept = load_file(folder / BLOCKS_FILE)
    assert kept["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert kept["model.layers.0.mlp.down_proj.weight"].dtype == torch.uint8


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    folder = resolve(str(make_tiny_gguf(tmp_path, FEW_BITS, **WIDE)), tmp_path / "cache").path
    whole = load_file(folder / BLOCKS_FILE)
    with safe_open(folder / BLOCKS_FILE, "pt") as file:
        metadata = file.metadata()
    tried = set()
    for name, (kind, _) in json.loads(metadata["kinds"]).items():
        if not name.startswith("model.layers.1.") or kind in tried:
            continue
        tried.add(kind)
        weights = {**whole, name: whole[name].clone()}
        last = weights[name].view(len(weights[name]), -1, sizes_of(kind)[1])[-1, -1]
        # Infinity, or a power of two that no float is 12 times as great as.
        last[: 1 if kind == "MXFP4" else 0] = 253
        last[halves_of(kind)] = torch.tensor([0, 0x7C], dtype=torch.uint8).repeat(len(last[halves_of(kind)]) // 2)
        save_file(weights, folder / BLOCKS_FILE, metadata=metadata)
        with refuses(ConfigurationError, says=f"{name} holds infinite values or NaN"):
            TransformersTarget(TargetConfig(model_path=str(folder)))
    assert tried == {"IQ4_NL", "IQ4_XS", "MXFP4", "Q2_K", "Q3_K"}


def test_damage_is_refused_by_name(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="tiny.gguf"):
        resolve(str(make_tiny_gguf(tmp_path, {}, without="blk.1.ffn_up.weight")), tmp_path / "cache")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not for long")
    with refuses(ConfigurationError, field="broken.gguf"):
        resolve(str(tmp_path / "broken.gguf"), tmp_path / "cache")
    assert not list((tmp_path / "cache" / "models").iterdir())
    folder = resolve(str(make_tiny_gguf(tmp_path / "whole", {})), tmp_path / "cache").path
    weights = load_file(folder / BLOCKS_FILE)
    weights["model.norm.weight"] = weights["model.norm.weight"][:8].clone()
    save_file(weights, folder / BLOCKS_FILE, metadata={"kinds": "{}"})
    with refuses(ConfigurationError, says="model.norm.weight is (8,), its configuration says (64,)"):
        TransformersTarget(TargetConfig(model_path=str(folder)))
    del weights["model.norm.weight"]
    save_file(weights, folder / BLOCKS_FILE, metadata={"kinds": "{}"})
    with refuses(ConfigurationError, says="hold no model.norm.weight"):
        TransformersTarget(TargetConfig(model_path=str(folder)))
    save_file(weights, folder / BLOCKS_FILE, metadata={"kinds": '{"model.layers.0.mlp.up_proj.weight": ["Q9", 64]}'})
    with refuses(ConfigurationError, says="blocks of the type Q9"):
        TransformersTarget(TargetConfig(model_path=str(folder)))
