"""Quantised checkpoints: the numbers that the format defines, and the answers of the float model that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from cluster.checks.model_files import count_weights, expanded
from cluster.settings.components import VerifierSettings
from services.drafter.draft_model.loading import load_draft_model
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import check_weights
from services.model_files.weights.stored_blocks import stored_as
from services.verifier.config import TargetConfig
from services.verifier.kernels.exact_weights import ExactWeight
from services.verifier.kernels.linears import as_float
from services.verifier.kernels.native.library import library
from services.verifier.loading.load_model import load_layers, load_whole
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.sources import SOURCES, STRATEGIES
from tests.engine.fakes import PLAIN
from tests.engine.layouts import in_one_process
from tests.engine.stage_forks import launch_fork
from tests.lossless.test_stages import passes
from tests.lossless.test_strategies import ANSWER, PROMPTS, answers, plan_of, said, verifier
from tests.tiny_models.gpt_oss import make_gpt_oss
from tests.tiny_models.mixture import make_mixture
from tests.tiny_models.quantised import FORMS, Make, each_once, make_float_model, quantise

FILE = "model.safetensors"
# Symmetric whole numbers with scales of 16 bits.
KEPT_AS = {"compressed_w4_halves": "Q4_0", "compressed_w8_halves": "Q8_0", "gptq": "Q4_0", "gptq_8_bits": "Q8_0"}
# With zero points.
KEPT_AS |= dict.fromkeys(("compressed_w4_zeros", "awq", "gptq_v2", "gptq_3_bits", "hqq_4_bits", "hqq_3_bits"), "Q4_Z")
KEPT_AS |= dict.fromkeys(("compressed_w8_zeros_halves", "gptq_8_bits_zeros", "hqq_8_bits_halves"), "Q8_Z")
KEPT_AS |= dict.fromkeys(("fp8_blocks_of_128", "fp8_blocks_of_32", "fp8_rows", "fp8_whole"), "E4M3")
KEPT_AS |= dict.fromkeys(("compressed_fp8", "compressed_fp8_whole", "compressed_fp8_blocks"), "E4M3")
KEPT_AS |= {"compressed_mxfp4": "MXFP4", "compressed_mxfp8": "E4M3", "compressed_nvfp4": "E2M1"}
KEPT_AS |= dict.fromkeys(("compressed_w4_groups_of_16", "gptq_groups_of_16"), "Q4_H")
KEPT_AS |= {"bnb_nf4": "NF4", "bnb_nf4_nested": "NF4", "bnb_fp4": "FP4"}
# Blocks of inputs in another order, whose sums are their own: see test_act_order.py.
ORDERED_AS = {"gptq_ordered": "Q4_Z"}
TEXT = tuple(range(5, 45))


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_float_model(tmp_path_factory.mktemp("float"))


@pytest.fixture(scope="module")
def made_of(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    return each_once(float_model, tmp_path_factory)


def of(folder: Path, **settings: object) -> TargetConfig:
    return TargetConfig(model_path=str(folder), kv_cache_tokens=512, **settings)  # type: ignore[arg-type]


def logits(folder: Path, **settings: object) -> torch.Tensor:
    """Of a prompt, then of a tree behind it."""
    target = TransformersTarget(of(folder, **settings))
    target.open("a", 200)
    made = target.forward([Rows(request_id="a", context=0, tokens=TEXT, logits=len(TEXT))])[0]
    target.keep("a", 0, range(len(TEXT)))
    tree = Rows(request_id="a", context=len(TEXT), tokens=(7, 8, 9, 10, 11), parents=(-1, 0, -1, 2), logits=5)
    return torch.cat([made, target.forward([tree])[0]])


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_the_numbers_of_the_format(form: str, made_of: Make) -> None:
    folder, plain = made_of(form)
    ours = load_whole(of(folder, weights="float32")).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name].float(), weight), name
    # Where blocks hold them, these are the same numbers.
    with WeightFiles(folder) as files:
        kinds = {stored_as(files.get(name)) for name in files.names if name.endswith(".up_proj.weight")}
        assert all(torch.equal(files.numbers(name).float(), weight) for name, weight in load_file(plain / FILE).items())
    assert kinds == {{**KEPT_AS, **ORDERED_AS}.get(form, "float32")}
    # Each stage expands its own layers alone.
    layers = load_layers(of(folder, stages=2, weights="float32"), range(1, 2)).state_dict()
    assert torch.equal(layers["model.layers.0.mlp.up_proj.weight"].float(), theirs["model.layers.1.mlp.up_proj.weight"])
    assert not any("embed_tokens" in name for name in layers)


@pytest.mark.examples(5)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_float_model(form: str, made_of: Make) -> None:
    folder, plain = made_of(form)
    made = logits(folder, kernels="torch")
    assert torch.equal(made, logits(plain, kernels="torch"))
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(torch.tensor([TEXT])).logits[0]
    assert torch.equal(made[: len(TEXT)].argmax(-1), reference.argmax(-1))


@pytest.mark.examples(3)
@pytest.mark.parametrize("form", KEPT_AS)
def test_layers_multiply_by_blocks_with_the_same_bits(form: str, made_of: Make) -> None:
    if library() is None:
        pytest.skip("no C compiler here")
    folder, plain = made_of(form)
    target = TransformersTarget(of(folder, weights="as_stored"))
    assert target.kernels.weights == "as_stored"
    assert torch.equal(
        logits(folder, weights="as_stored"), logits(plain, weights="float32", kernels=target.kernels.instructions)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("link", "sampling"),
    [
        ("in_process", {}),
        ("in_process", {"temperature": 0.7, "top_p": 0.9, "seed": 2}),
        ("grpc", {"temperature": 1.0, "seed": 1}),
    ],
    ids=str,
)
async def test_every_strategy_says_what_the_float_model_says(link: str, sampling: dict[str, object], made_of: Make) -> None:
    folder, plain = made_of("gptq_ordered")
    with in_one_process():
        wanted = await answers(plain, "real", "in_process", PLAIN, sampling, together=False)
    async with verifier(folder, "real", link, "fixed") as running:
        assert await said(running, PLAIN, sampling, together=True) == wanted
        for sources in (*((source,) for source in SOURCES), STRATEGIES["blend"]):
            assert await said(running, plan_of(sources), sampling, together=True) == wanted, sources
    if not sampling:
        reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
            assert theirs[0, len(prompt) :].tolist() == answer


@pytest.mark.exhaustive
def test_two_stages_say_what_the_float_model_says(made_of: Make) -> None:
    folder, plain = made_of("awq")
    target = TransformersTarget(of(folder, stages=2, threads=1), launch_fork)
    try:
        assert torch.equal(passes(target), passes(TransformersTarget(of(plain, threads=1))))
    finally:
        target.shutdown()


@pytest.mark.parametrize("weights", ["auto", "float32"])
def test_a_mixture_has_the_numbers_that_transformers_joins(weights: str, float_model: Path, tmp_path: Path) -> None:
    """Its files have a matrix for each expert, the model one for all; in numbers, transformers makes that of them."""
    mixture = make_mixture(float_model, tmp_path / "mixture")
    folder, plain = quantise(mixture, tmp_path, FORMS["fp8_blocks_of_128"])
    assert any(".experts.0." in name for name in load_file(folder / FILE))
    ours = load_whole(of(folder, weights=weights))
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(numbers(ours, name), weight), name
    assert torch.equal(logits(folder, weights=weights), logits(plain, weights="float32"))


def numbers(model: nn.Module, name: str) -> torch.Tensor:
    """A weight of a loaded model in float32, whatever holds it."""
    place, _, own = name.rpartition(".")
    held: Any = getattr(model.get_submodule(place), own)
    plain: torch.Tensor = held.numbers.plain() if isinstance(held, ExactWeight) else held.float()
    return plain


def test_codes_and_scales_may_lie_in_different_files(float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, FORMS["gptq"])
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    places = {name: f"{'scales' if name.endswith('scales') else 'others'}.safetensors" for name in weights}
    for file in set(places.values()):
        save_file({name: weight for name, weight in weights.items() if places[name] == file}, folder / file)
    (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    ours = load_whole(of(folder, weights="float32")).state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in load_file(plain / FILE).items())


def test_the_experts_of_gpt_oss(float_model: Path, tmp_path: Path) -> None:
    folder, plain = make_gpt_oss(float_model, tmp_path)
    ours = load_whole(of(folder))
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(numbers(ours, name), weight), name
    assert torch.equal(logits(folder), logits(plain, weights="float32"))


def test_the_plan_says_what_it_becomes(made_of: Make) -> None:
    folder, plain = made_of("fp8_blocks_of_128")
    numbers = sum(tensor.numel() for tensor in load_file(plain / FILE).values())
    said = expanded(VerifierSettings(weights="float32"), folder)
    assert said.startswith("FP8 in blocks of 128 x 128: the numbers")
    assert f" {numbers * 4 / 2**20:,.0f} MiB in float32" in said
    assert expanded(VerifierSettings(), plain) == ""


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    ("form", "kind", "each"),
    [
        ("gptq", "Q4_0", 18),
        ("awq", "Q4_Z", 20),
        ("hqq_4_bits", "Q4_Z", 20),
        ("gptq_8_bits_zeros", "Q8_Z", 36),
        ("fp8_rows", "E4M3", 36),
        ("compressed_mxfp4", "MXFP4", 17),
        ("compressed_nvfp4", "E2M1", 24),
        ("gptq_groups_of_16", "Q4_H", 24),
    ],
)
def test_the_memory_of_blocks_is_known_before_they_are_read(
    form: str, kind: str, each: int, float_model: Path, tmp_path: Path, made_of: Make
) -> None:
    if library() is None:
        pytest.skip("no C compiler here")
    folder, plain = made_of(form)
    sizes = {name: tensor.numel() for name, tensor in load_file(plain / FILE).items()}
    packed = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    taken = packed * each / 32 + (sum(sizes.values()) - packed) * 4
    assert shape_of(of(folder)).kept_bytes == taken / sum(sizes.values())
    assert shape_of(of(folder, weights="float32")).kept_bytes is None
    assert count_weights(check_weights(folder, {})).stored == 1
    said = expanded(VerifierSettings(), folder)
    assert f" {taken / 2**20:,.0f} MiB in float32, linear layers multiplied as {kind} where that is faster" in said
    mixture, _ = quantise(make_mixture(float_model, tmp_path / "mixture"), tmp_path / "experts", FORMS[form])
    assert f"linear layers and experts multiplied as {kind}" in expanded(VerifierSettings(), mixture)
    assert shape_of(of(mixture)).kept_bytes < 4
    assert "multiplied" not in expanded(VerifierSettings(weights="float32"), mixture)
    assert shape_of(of(mixture, weights="float32")).kept_bytes is None


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_rows_in_several_places_are_read_of_blocks(form: str, made_of: Make) -> None:
    """As ranks need them of a product of several."""
    folder, plain = made_of(form)
    name, ranges = "model.layers.0.mlp.up_proj.weight", (range(16), range(96, 112))
    with WeightFiles(folder) as files:
        made = files.parts(name, 0, ranges)
    assert stored_as(made) == KEPT_AS[form]
    assert torch.equal(as_float(made), load_file(plain / FILE)[name][[*ranges[0], *ranges[1]]])


def test_a_draft_model_of_it_has_the_plain_weights(made_of: Make) -> None:
    folder, plain = made_of("fp8_rows")
    ours, theirs = (load_draft_model(one, plain, device="cpu", dtype="float32").state_dict() for one in (folder, plain))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
