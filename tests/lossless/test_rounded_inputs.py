"""Checkpoints whose layers round what enters them: compressed-tensors' own numbers, and trees that change no token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.checks.model_files import expanded
from cluster.settings.components import VerifierSettings
from services.drafter.draft_model.loading import load_draft_model
from services.drafter.draft_model.model import DraftLM
from services.model_files.weights.rounded_inputs import InputRounding, roundings_of
from services.verifier.checks.exactness import is_exact
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.library import library
from services.verifier.loading.load_model import load_layers, load_whole
from services.verifier.model import fused_layers
from services.verifier.model.means import MEANS
from services.verifier.model.new_weights import NewWeights
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from speculation.errors import ConfigurationError, spelled
from speculation.sources import SOURCES, STRATEGIES
from tests.engine.fakes import PLAIN
from tests.engine.layouts import in_one_process
from tests.engine.stage_forks import launch_fork
from tests.engine.virtual_ranks import ranks_of, together
from tests.lossless import test_tensor_parallel as parallel
from tests.lossless.test_lora_over_ranks import check
from tests.lossless.test_stages import passes
from tests.lossless.test_strategies import plan_of, said, verifier
from tests.running.refusals import refuses
from tests.tiny_models.lora import make_adapter
from tests.tiny_models.quantised import EACH_ROW, FP8, MX, NVFP4, ROUNDED, compressed, configure, make_float_model, quantise

FILE = "model.safetensors"
TEXT = torch.arange(5, 45)[None]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_float_model(tmp_path_factory.mktemp("float"))


def of(folder: Path, **settings: object) -> TargetConfig:
    return TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=512, threads=1, **settings)  # type: ignore[arg-type]


def by_the_package(folder: Path, plain: Path) -> PreTrainedModel:
    """The float model, with compressed-tensors' rounding of what enters its layers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = config.get("config_groups", {"group_0": {"input_activations": FP8}})
    args = QuantizationArgs(**groups["group_0"]["input_activations"])
    stored = load_file(folder / FILE)

    def rounded(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (forward_quantize(module, given[0], "input", args),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.quantization_status = QuantizationStatus.COMPRESSED
            named = {name: name for name in ("input_scale", "input_zero_point", "input_global_scale")}
            for part, own in {**named, "activation_scale": "input_scale"}.items():
                if f"{name}.{part}" in stored:
                    setattr(module, own, stored[f"{name}.{part}"])
            module.register_forward_pre_hook(rounded)
    return model


@pytest.mark.examples(3)
@pytest.mark.parametrize("form", ROUNDED)
@torch.inference_mode()
def test_logits_are_those_of_the_package(form: str, float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, ROUNDED[form])
    model = load_whole(of(folder, weights="float32"))
    model.set_attn_implementation("eager")
    made = model(TEXT).logits
    assert torch.equal(made, by_the_package(folder, plain)(TEXT).logits)
    exact = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    assert (made - exact(TEXT).logits).abs().max() > 0.1
    assert len(roundings_of(model)) == 14
    # A stage rounds in its own layers, under their own numbers.
    layer = load_layers(of(folder, stages=2, weights="float32"), range(1, 2)).model.layers[0]
    given = torch.randn(1, 5, 192)
    assert torch.equal(layer.mlp(given), model.model.layers[1].mlp(given))


@torch.inference_mode()
def test_rows_of_zeros_and_of_small_numbers() -> None:
    rows = torch.stack([torch.zeros(32), torch.full((32,), 1e-42), torch.linspace(-3, 2, 32), torch.linspace(0, 1, 32)])
    for fields in (EACH_ROW, {**EACH_ROW, "symmetric": False}, {**EACH_ROW, **FP8}):
        args = QuantizationArgs(**fields)  # type: ignore[arg-type]
        rounding = InputRounding(floats=args.type == "float", symmetric=args.symmetric)
        module = torch.nn.Linear(32, 1)
        module.quantization_status = QuantizationStatus.COMPRESSED  # type: ignore[assignment]
        assert torch.equal(rounding(rows[None]), forward_quantize(module, rows[None], "input", args)), fields
        # Each row by itself.
        assert torch.equal(rounding(rows), torch.cat([rounding(row[None]) for row in rows]))


@torch.inference_mode()
def test_blocks_whose_scales_are_rounded_themselves() -> None:
    """NVFP4, from blocks of zeros to such as FP8 has no scale for."""
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-40, 20, 40)[:, None]
    rows[3, 16:48] = 0
    args = QuantizationArgs(**NVFP4, dynamic="local")  # type: ignore[arg-type]
    module = torch.nn.Linear(64, 1)
    module.quantization_status = QuantizationStatus.COMPRESSED  # type: ignore[assignment]
    for global_scale in (1.0, 300.0, 1e5):
        module.input_global_scale = torch.tensor([global_scale])
        rounding = InputRounding(floats=True, bits=4, size=16, global_scale=global_scale)
        made = rounding(rows[None])
        assert torch.equal(made, forward_quantize(module, rows[None], "input", args))
        assert torch.equal(made[0], torch.cat([rounding(row[None]) for row in rows]))
        assert torch.equal(rounding(rows.bfloat16()), rounding(rows.bfloat16().float()).bfloat16())


@torch.inference_mode()
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_whose_scales_are_powers_of_two(bits: int) -> None:
    """MXFP4 and MXFP8: every power that a float has, at the borders between two."""
    fractions = torch.tensor([1.0, 1.25, 1.7499999, 1.75, 1.7500001, 1.9999999])
    greatest = (fractions * 2.0 ** torch.arange(-126, 127)[:, None]).flatten()
    rows = torch.randn(len(greatest), 32, generator=torch.Generator().manual_seed(0)).clamp(-1, 1) * greatest[:, None]
    rows[:, 5] = greatest
    rows = torch.cat([rows, torch.zeros(2, 32), torch.full((1, 32), 1e-42)])
    args = QuantizationArgs(**MX, num_bits=bits, dynamic=True)
    module = torch.nn.Linear(32, 1)
    module.quantization_status = QuantizationStatus.COMPRESSED  # type: ignore[assignment]
    rounding = InputRounding(floats=True, bits=bits, size=32, powers=True)
    made = rounding(rows)
    assert torch.equal(made, forward_quantize(module, rows[None], "input", args)[0])
    assert torch.equal(made, torch.cat([rounding(row[None]) for row in rows]))
    assert torch.equal(rounding(rows.bfloat16()), rounding(rows.bfloat16().float()).bfloat16())
    # As other scales would be.
    assert not torch.equal(made, InputRounding(floats=True, bits=bits, size=32)(rows))


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    "form",
    [
        "w8a8_halves", "w8a8_zeros_halves", "w8a8_stored_zeros", "fp8_dynamic", "fp8_static", "fp8_block", "nvfp4", "mxfp4",
        "mxfp8",
    ],
)  # fmt: skip
def test_whole_layers_round_in_our_kernels(
    form: str, float_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as modules to rounding, which moves a number to the next code in few rows."""
    if library() is None:
        pytest.skip("no C compiler here")
    folder, _ = quantise(float_model, tmp_path, ROUNDED[form])
    part = ModelSlice(of(folder), 0)
    assert all(isinstance(layer.forward, FusedLayer) for layer in part.model.model.layers)
    monkeypatch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
    text = Rows(request_id="a", context=0, tokens=tuple(TEXT[0].tolist()), logits=TEXT.shape[1])
    made, expected = (logits_of(one, text) for one in (part, ModelSlice(of(folder), 0)))
    off = (made - expected).abs().amax(-1) / expected.abs().max()
    assert off.quantile(0.75) < 1e-5
    assert off.max() < 0.05


def logits_of(part: ModelSlice, text: Rows) -> torch.Tensor:
    part.pool.assign("a", [0], 1)
    return part.run([text], None)


def test_only_layers_that_are_meant(float_model: Path, tmp_path: Path) -> None:
    """Layers that the checkpoint leaves out round nothing, and run in our kernels for whole layers where all of one is."""
    folder, plain = quantise(float_model, tmp_path, ROUNDED["w8a8"])
    numbers, stored = load_file(plain / FILE), load_file(folder / FILE)
    left = {name: numbers[name] for name in numbers if ".layers.0." in name}
    save_file({name: one for name, one in stored.items() if ".layers.0." not in name} | left, folder / FILE)
    config = dict(ROUNDED["w8a8"].config)
    configure(folder, quantization_config={**config, "ignore": ["lm_head", "re:.*layers.0.*"]})
    part = ModelSlice(of(folder), 0)
    assert {name.split(".")[2] for name in roundings_of(part.model)} == {"1"}
    ours = [isinstance(layer.forward, FusedLayer) for layer in part.model.model.layers]
    assert ours == [library() is not None] * 2


@pytest.mark.examples(3)
@pytest.mark.parametrize("kernels", ["auto", "onednn"])
@pytest.mark.parametrize("form", ["w8a8_halves", "w8a8_zeros_halves", "fp8_dynamic", "fp8_block", "nvfp4", "mxfp4", "mxfp8"])
def test_a_row_does_not_depend_on_others(form: str, kernels: str, float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, ROUNDED[form])
    target = TransformersTarget(of(folder, kernels=kernels))
    assert is_exact(target)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["w8a8_halves", "fp8_dynamic", "nvfp4"])
@pytest.mark.parametrize(
    ("link", "sampling"),
    [("in_process", {}), ("grpc", {"temperature": 0.8, "top_p": 0.95, "seed": 3})],
    ids=str,
)
async def test_every_strategy_says_what_plain_decoding_says(
    form: str, link: str, sampling: dict[str, object], float_model: Path, tmp_path: Path
) -> None:
    folder, _ = quantise(float_model, tmp_path, ROUNDED[form])
    with in_one_process():
        async with verifier(folder, "real", "in_process", "fixed", drafting_for=float_model) as running:
            wanted = await said(running, PLAIN, sampling, together=False)
    async with verifier(folder, "real", link, "fixed", drafting_for=float_model) as running:
        for sources in (*((source,) for source in SOURCES), STRATEGIES["blend"]):
            assert await said(running, plan_of(sources), sampling, together=True) == wanted, sources


@pytest.mark.exhaustive
def test_two_stages_say_the_same(float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, ROUNDED["fp8_stored"])
    target = TransformersTarget(of(folder, stages=2), launch_fork)
    try:
        assert torch.equal(passes(target), passes(TransformersTarget(of(folder))))
    finally:
        target.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["w8a8_halves", "nvfp4"])
def test_two_ranks_say_the_same(form: str, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C compiler here")
    folder, _ = quantise(make_float_model(tmp_path / "float", **parallel.SIZES), tmp_path, ROUNDED[form])
    alone = parallel.passes(ModelSlice(parallel.config(folder), 0))
    parts = ranks_of(parallel.config(folder, 2))
    assert all(torch.equal(made, alone) for made in together(parts, parallel.passes))
    layers = [layer for part in parts for layer in part.model.get_decoder().layers]
    assert all(isinstance(layer.forward, FusedLayer) for layer in layers)


@pytest.mark.parametrize("form", ["w8a8_halves", pytest.param("w8a8_zeros", marks=pytest.mark.exhaustive)])
def test_adapters_over_ranks_read_what_is_not_rounded(form: str, tmp_path: Path) -> None:
    if library() is None:
        pytest.skip("no C compiler here")
    plain = make_float_model(tmp_path / "float", **parallel.SIZES)
    folder, _ = quantise(plain, tmp_path, ROUNDED[form])
    check(folder, 2, plain)


@pytest.mark.parametrize("form", ["w8a8", "w8a8_zeros"])
@torch.inference_mode()
def test_an_adapter_reads_what_is_not_rounded(
    form: str, float_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT's do: in whole layers by our kernels, and in modules."""
    if form == "w8a8_zeros":
        monkeypatch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
    peft = pytest.importorskip("peft")
    if library() is None:
        pytest.skip("no C compiler here")
    folder, plain = quantise(float_model, tmp_path, ROUNDED[form])
    targets = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    adapter = make_adapter(tmp_path / "adapter", float_model, seed=1, targets=targets)
    target = TransformersTarget(of(folder, lora_modules={"one": str(adapter)}))
    tokens = TEXT[0].tolist()
    assert target.open("a", len(tokens), Prefix(tokens=tokens, adapter="one"))
    made = target.forward([Rows(request_id="a", context=0, tokens=tuple(tokens), logits=len(tokens))])[0]
    base = by_the_package(folder, plain)
    without = base(TEXT).logits[0]
    expected = peft.PeftModel.from_pretrained(base, adapter).eval()(TEXT).logits[0]
    assert (expected - without).abs().max() > 0.1 * expected.abs().max()
    off = (made - expected).abs().amax(-1) / expected.abs().max()
    assert off.quantile(0.75) < 1e-5


def test_a_draft_model_rounds_its_inputs(float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, ROUNDED["w8a8"])
    model = load_draft_model(folder, plain, device="cpu", dtype="float32")
    assert len(roundings_of(model)) == 14
    DraftLM(model, folder)


def test_the_plan_says_so(float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, ROUNDED["fp8_dynamic"])
    assert expanded(VerifierSettings(), folder).endswith(
        "what enters a layer is rounded to floats of 8 bits with a scale for each row"
    )


def test_weights_are_not_replaced_by_those_that_round_otherwise(float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path / "a", ROUNDED["w8a8"])
    other, _ = quantise(float_model, tmp_path / "b", ROUNDED["w8a8_zeros"])
    part = ModelSlice(of(folder), 0)
    NewWeights(of(folder), part.model, part.choice, MEANS)
    with refuses(ConfigurationError, says="round what enters them otherwise"):
        NewWeights(of(other), part.model, part.choice, MEANS)


@pytest.mark.parametrize("scale", [0.0, float("inf"), None])
@pytest.mark.parametrize(
    ("form", "part"),
    [("fp8_stored", "input_scale"), ("fp8_static", "activation_scale"), ("nvfp4", "input_global_scale")],
)
def test_stored_scales_are_checked(form: str, part: str, scale: float | None, float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, ROUNDED[form])
    weights = load_file(folder / FILE)
    name = f"model.layers.1.mlp.up_proj.{part}"
    if scale is None:
        del weights[name]
    else:
        weights[name] = torch.tensor([scale])
    save_file(weights, folder / FILE)
    with refuses(ConfigurationError, says=name):
        load_whole(of(folder))


FIELDS: Mapping[str, tuple[dict[str, Any], object]] = {
    "strategy": ({"num_bits": 8, "dynamic": True, "strategy": "tensor"}, "tensor"),
    "num_bits": ({**EACH_ROW, "num_bits": 4}, 4),
    "dynamic": ({**EACH_ROW, "dynamic": "local"}, "local"),
    "scale_dtype": (
        {**FP8, "dynamic": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.float8_e4m3fn"},
        "torch.float8_e4m3fn",
    ),
    "symmetric": ({**EACH_ROW, **FP8, "symmetric": False}, False),
    "group_size": ({**EACH_ROW, "strategy": "group"}, None),
    "type": ({**EACH_ROW, "type": "fp"}, "fp"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields_are_checked(field: str, float_model: Path, tmp_path: Path) -> None:
    entering, value = FIELDS[field]
    folder, _ = quantise(float_model, tmp_path, compressed(num_bits=8, strategy="channel"))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = entering
    configure(folder, quantization_config=config)
    with refuses(ConfigurationError, f"quantization_config.config_groups.group_0.input_activations.{field}", spelled(value)):
        load_whole(of(folder))


def check_refused(form: str, field: str, value: object, float_model: Path, tmp_path: Path) -> None:
    """A checkpoint of that form is refused by the field's name if what enters its layers says ``value`` there."""
    folder, _ = quantise(float_model, tmp_path, ROUNDED[form])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"][field] = value
    configure(folder, quantization_config=config)
    name = f"quantization_config.config_groups.group_0.input_activations.{field}"
    with refuses(ConfigurationError, name, spelled(value)):
        load_whole(of(folder))


OF_FOUR_BITS: Mapping[str, object] = {
    "strategy": "group",
    "group_size": 32,
    "dynamic": True,
    "symmetric": False,
    "scale_dtype": "torch.bfloat16",
}


@pytest.mark.parametrize("field", OF_FOUR_BITS)
def test_fields_of_four_bits_are_checked(field: str, float_model: Path, tmp_path: Path) -> None:
    check_refused("nvfp4", field, OF_FOUR_BITS[field], float_model, tmp_path)


OF_POWERS: Mapping[str, object] = {"strategy": "token", "group_size": 64, "dynamic": False, "symmetric": False}


@pytest.mark.parametrize("field", OF_POWERS)
def test_fields_of_powers_of_two_are_checked(field: str, float_model: Path, tmp_path: Path) -> None:
    check_refused("mxfp4", field, OF_POWERS[field], float_model, tmp_path)


def test_files_from_before_scales_had_a_type(float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, ROUNDED["nvfp4"])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for part in ("weights", "input_activations"):
        del config["config_groups"]["group_0"][part]["scale_dtype"]
    configure(folder, quantization_config=config)
    found = roundings_of(load_whole(of(folder, weights="float32")))
    assert set(found.values()) == {InputRounding(floats=True, bits=4, size=16, global_scale=500.0)}


def test_static_scales_of_rows_are_refused(float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, compressed(num_bits=8, strategy="channel"))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"] |= {"input_activations": {**EACH_ROW, "dynamic": False}}
    configure(folder, quantization_config=config)
    with refuses(ConfigurationError, "quantization_config.config_groups.group_0.input_activations.strategy", "token"):
        load_whole(of(folder))
