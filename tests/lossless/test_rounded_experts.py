"""Mixtures whose experts round what enters them: compressed-tensors' own numbers, whatever shares a pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.model_files.weights.rounded_inputs import InputRounding, round_experts, roundings_of, unrounded
from services.verifier.checks.exactness import is_exact
from services.verifier.kernels import experts
from services.verifier.loading.load_model import hollow_model, load_layers, load_whole
from services.verifier.loading.rounding import round_entering
from services.verifier.model.means import MEANS
from services.verifier.model.new_weights import NewWeights
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from speculation.sources import STRATEGIES
from tests.engine.fakes import PLAIN
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_tensor_parallel as parallel
from tests.lossless.test_quantised_mixtures import make_random_mixture
from tests.lossless.test_rounded_inputs import FILE, TEXT, of
from tests.lossless.test_strategies import plan_of, said, verifier
from tests.running.refusals import refuses
from tests.tiny_models.quantised import ROUNDED, quantise

FORMS = ("w8a8_halves", "w8a8_zeros", "fp8_stored", "fp8_block", "nvfp4", "mxfp4", "mxfp8", "w4afp8")
STORED = ("input_scale", "input_global_scale")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_mixture(tmp_path_factory.mktemp("mixture"))


def made_of(mixture: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Stored scales differ from expert to expert, and are those of its gates and ups."""
    stored, plain = quantise(mixture, folder, ROUNDED[form])
    weights = load_file(stored / FILE)
    for name in weights:
        if ".experts." in name and name.endswith(STORED):
            number, part = int(name.split(".experts.")[1].split(".")[0]), "down" in name
            weights[name] = weights[name] * (1 + number / 8 + part / 3)
    save_file(weights, stored / FILE, metadata={"format": "pt"})
    return stored, plain


def by_the_package(folder: Path, plain: Path) -> PreTrainedModel:
    """The float model, with compressed-tensors' rounding of what enters its layers and experts."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    group = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    args, stored = QuantizationArgs(**group["input_activations"]), load_file(folder / FILE)

    def rounded(name: str, rows: torch.Tensor) -> torch.Tensor:
        module = nn.Linear(1, 1)
        module.quantization_status = QuantizationStatus.COMPRESSED  # type: ignore[assignment]
        for part in STORED:
            if f"{name}.{part}" in stored:
                setattr(module, part, stored[f"{name}.{part}"])
        made: torch.Tensor = forward_quantize(module, rows[None], "input", args)[0]
        return made

    def compute(self: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for number in index.unique().tolist():
            rows, place = torch.where(index == number)
            own = f"{names[id(self)]}.{number}"
            up = functional.linear(rounded(f"{own}.up_proj", hidden[rows]), self.gate_up_proj[number])
            down = functional.linear(rounded(f"{own}.down_proj", self._apply_gate(up)), self.down_proj[number])
            total.index_add_(0, rows, down * weights[rows, place, None])
        return total

    names = {id(module): name for name, module in model.named_modules() if name.endswith(".experts")}
    ALL_EXPERTS_FUNCTIONS.register("of_the_test", compute)
    model.config._experts_implementation = "of_the_test"
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, given, name=name: (rounded(name, given[0][0])[None],))
    return model


@pytest.mark.examples(3)
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_logits_are_those_of_the_package(form: str, mixture: Path, tmp_path: Path) -> None:
    folder, plain = made_of(mixture, tmp_path, form)
    model = load_whole(of(folder, weights="float32"))
    model.set_attn_implementation("eager")
    experts.use(model)
    made, theirs = model(TEXT).logits, by_the_package(folder, plain)(TEXT).logits
    # Experts' rows are added up in another order.
    off = (made - theirs).abs().amax(-1) / theirs.abs().max()
    assert off.quantile(0.75) < 1e-5 and off.max() < 0.05
    with unrounded(model):
        assert (made - model(TEXT).logits).abs().max() > 0.02 * made.abs().max()
    found = roundings_of(model)
    assert len(found) == 2 * (4 + 2)
    assert len(found["model.layers.1.mlp.experts.down_proj"]) == 6  # type: ignore[arg-type]
    # A stage rounds in its own layers, under their own numbers.
    part = load_layers(of(folder, stages=2, weights="float32"), range(1, 2))
    experts.use(part)
    given = torch.randn(1, 5, 128)
    assert torch.equal(part.model.layers[0].mlp(given), model.model.layers[1].mlp(given))


@pytest.mark.examples(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_others(form: str, mixture: Path, tmp_path: Path) -> None:
    folder, _ = made_of(mixture, tmp_path, form)
    target = TransformersTarget(of(folder))
    assert is_exact(target)
    assert any(name.endswith("gate_up_proj") for name in roundings_of(target._part.model))


@needs_kernels
@pytest.mark.parametrize("form", ["w8a8_halves", "nvfp4", "mxfp4"])
def test_ranks_and_blocks_have_the_bits_of_one_process(form: str, mixture: Path, tmp_path: Path) -> None:
    folder, _ = made_of(mixture, tmp_path, form)
    alone = parallel.passes(ModelSlice(parallel.config(folder, weights="float32"), 0))
    parts = ranks_of(parallel.config(folder, 2, weights="as_stored"))
    assert all(torch.equal(made, alone) for made in together(parts, parallel.passes))
    assert all(roundings_of(part.model) for part in parts)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}], ids=str)
@pytest.mark.parametrize("form", ["w8a8_halves", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
async def test_drafts_change_no_token(form: str, sampling: dict[str, object], mixture: Path, tmp_path: Path) -> None:
    folder, _ = made_of(mixture, tmp_path, form)
    async with verifier(folder, "real", "in_process", "fixed", drafting_for=mixture) as running:
        wanted = await said(running, PLAIN, sampling, together=False)
        assert await said(running, plan_of(STRATEGIES["blend"]), sampling, together=True) == wanted


def test_experts_with_their_own_scales() -> None:
    """Some of them round nothing."""
    made = nn.Module()
    made.experts = nn.Module()
    made.experts._apply_gate = None  # type: ignore[assignment]
    roundings = [InputRounding(stored=True, scale=0.1), None, InputRounding()]
    round_experts(made, {"experts.down_proj": roundings})
    inputs = made.experts.__dict__["_rounded_inputs"]["down_proj"]
    rows = torch.randn(6, 8)
    given = inputs(rows, torch.tensor([0, 1, 2]), torch.tensor([2, 1, 3]))
    assert torch.equal(given, torch.cat([roundings[0](rows[:2]), rows[2:3], roundings[2](rows[3:])]))  # type: ignore[misc]
    with unrounded(made):
        assert inputs(rows, torch.tensor([0]), torch.tensor([6])) is rows


def test_gates_and_ups_that_round_otherwise_are_refused(mixture: Path, tmp_path: Path) -> None:
    folder, _ = made_of(mixture, tmp_path, "nvfp4")
    weights = load_file(folder / FILE)
    weights["model.layers.1.mlp.experts.3.up_proj.input_global_scale"] *= 2
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    with refuses(
        ConfigurationError, says="model.layers.1.mlp.experts.3.up_proj.weight is rounded in different ways"
    ) as caught:
        load_whole(of(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scale", [0.0, float("nan"), None])
def test_damaged_scales_of_experts_are_refused(scale: float | None, mixture: Path, tmp_path: Path) -> None:
    folder, _ = made_of(mixture, tmp_path, "nvfp4")
    weights, name = load_file(folder / FILE), "model.layers.1.mlp.experts.2.down_proj.input_global_scale"
    if scale is None:
        del weights[name]
    else:
        weights[name] = torch.tensor([scale])
    save_file(weights, folder / FILE, metadata={"format": "pt"})
    with refuses(ConfigurationError, says=name) as caught:
        load_whole(of(folder))
    assert "\n" not in str(caught.value)


def test_other_mixtures_and_gpus_are_refused(mixture: Path, tmp_path: Path) -> None:
    made = nn.Module()
    made.experts = nn.Module()
    with pytest.raises(ValueError, match="computes experts in a way of its own"):
        round_experts(made, {"experts.down_proj": [InputRounding()]})
    folder, _ = made_of(mixture, tmp_path, "w8a8_halves")
    model = hollow_model(of(folder))
    with pytest.raises(ValueError, match="which GPUs do not do so far"):
        round_entering(model, replace(of(folder), device="cuda", dtype="bfloat16"), model)


def test_weights_are_not_replaced_by_those_that_round_otherwise(mixture: Path, tmp_path: Path) -> None:
    folder, _ = made_of(mixture, tmp_path / "a", "w8a8_halves")
    other, _ = made_of(mixture, tmp_path / "b", "w4afp8")
    part = ModelSlice(of(folder, weights="float32"), 0)
    with refuses(ConfigurationError, says="round what enters them otherwise"):
        NewWeights(of(other, weights="float32"), part.model, part.choice, MEANS)
