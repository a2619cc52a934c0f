"""Quantised checkpoints: the numbers that the format defines, and the answers of the float model that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.checks.model_files import count_weights, expanded
from cluster.settings.components import VerifierSettings
from services.drafter.draft_model.loading import load_draft_model
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import check_weights
from services.model_files.weights.stored_blocks import stored_as
from services.verifier.config import TargetConfig
from services.verifier.kernels.linears import as_float
from services.verifier.kernels.native.library import library
from services.verifier.loading.load_model import load_layers, load_whole
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from speculation.sources import SOURCES, STRATEGIES
from tests.fakes import PLAIN
from tests.lossless.test_stages import passes
from tests.lossless.test_strategies import ANSWER, PROMPTS, answers, plan_of, said, verifier
from tests.mixture import make_mixture
from tests.quantised import FORMS, configure, make_float_model, make_gpt_oss, quantise
from tests.refusals import refuses
from tests.stage_forks import launch_fork

FILE = "model.safetensors"
# Symmetric whole numbers with scales of 16 bits.
KEPT_AS = {"compressed_w4_halves": "Q4_0", "compressed_w8_halves": "Q8_0", "gptq": "Q4_0", "gptq_8_bits": "Q8_0"}
# With zero points.
KEPT_AS |= dict.fromkeys(("compressed_w4_zeros", "awq", "gptq_v2", "gptq_3_bits", "hqq_4_bits", "hqq_3_bits"), "Q4_Z")
KEPT_AS |= dict.fromkeys(("compressed_w8_zeros_halves", "gptq_8_bits_zeros", "hqq_8_bits_halves"), "Q8_Z")
KEPT_AS |= dict.fromkeys(("fp8_blocks_of_128", "fp8_blocks_of_32", "fp8_rows", "fp8_whole"), "E4M3")
KEPT_AS |= dict.fromkeys(("compressed_fp8", "compressed_fp8_whole", "compressed_fp8_blocks"), "E4M3")
KEPT_AS |= {"compressed_mxfp4": "MXFP4", "compressed_nvfp4": "E2M1"}
KEPT_AS |= {"bnb_nf4": "NF4", "bnb_nf4_nested": "NF4", "bnb_fp4": "FP4"}
TEXT = tuple(range(5, 45))
Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_float_model(tmp_path_factory.mktemp("float"))


Make = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made_of(float_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The float model in a form, and the float model that this stands for: folders for all tests that change nothing in them."""
    return cache(lambda form: quantise(float_model, tmp_path_factory.mktemp("form"), FORMS[form]))


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
    assert kinds == {KEPT_AS.get(form, "float32")}
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


def test_a_mixture_is_loaded_by_way_of_transformers(float_model: Path, tmp_path: Path) -> None:
    """Its files have a matrix for each expert, the model one for all."""
    mixture = make_mixture(float_model, tmp_path / "mixture")
    folder, plain = quantise(mixture, tmp_path, FORMS["fp8_blocks_of_128"])
    assert any(".experts.0." in name for name in load_file(folder / FILE))
    ours = load_whole(of(folder)).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(ours[name].float(), weight), name
    assert torch.equal(logits(folder), logits(plain))


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
    ours = load_whole(of(folder)).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(ours[name].float(), weight), name
    assert torch.equal(logits(folder), logits(plain))


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
    assert "multiplied" not in expanded(VerifierSettings(), mixture)
    assert shape_of(of(mixture)).kept_bytes is None


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_rows_in_several_places_are_read_of_blocks(form: str, made_of: Make) -> None:
    """As ranks need them of a product of several."""
    folder, plain = made_of(form)
    name, ranges = "model.layers.0.mlp.up_proj.weight", (range(16), range(96, 112))
    with WeightFiles(folder) as files:
        made = files.parts(name, 0, ranges)
    assert stored_as(made) == KEPT_AS[form]
    assert torch.equal(as_float(made), load_file(plain / FILE)[name][[*ranges[0], *ranges[1]]])


def test_it_drafts(made_of: Make) -> None:
    folder, plain = made_of("fp8_rows")
    ours, theirs = (load_draft_model(one, plain, device="cpu", dtype="float32").state_dict() for one in (folder, plain))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


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
    ("fp8_rows", {"bits": 4}, "quantization_config.quant_method", "None"),
    ("fp8_rows", {"quant_method": "fp8", "activation_scheme": "none"}, "quantization_config.activation_scheme", "none"),
    ("fp8_rows", {"quant_method": "fp8", "fmt": "e3m4"}, "quantization_config.fmt", "e3m4"),
    ("fp8_rows", {"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size", "[128]"),
    ("awq", {"quant_method": "awq", "bits": 4, "version": "gemv"}, "quantization_config.version", "gemv"),
    ("awq", {"quant_method": "awq", "w_bit": 8}, "quantization_config.w_bit", "8"),
    ("awq", {"quant_method": "awq", "zero_point": False}, "quantization_config.zero_point", "False"),
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
        "None",
    ),
    ("compressed_w8", {"quant_method": "compressed-tensors"}, "quantization_config.config_groups", "None"),
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
