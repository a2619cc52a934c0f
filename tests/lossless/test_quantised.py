"""Quantised checkpoints: the numbers that the format defines, and the answers of the float model that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.checks.model_files import expanded
from cluster.settings.components import VerifierSettings
from services.drafter.draft_model.loading import load_draft_model
from services.verifier.config import TargetConfig
from services.verifier.loading.load_model import load_layers, load_whole
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.mixture import make_mixture
from tests.quantised import FORMS, configure, make_float_model, quantise
from tests.refusals import refuses

TEXT = tuple(range(5, 45))
Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def float_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_float_model(tmp_path_factory.mktemp("float"))


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
def test_weights_are_the_numbers_of_the_format(form: str, float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, FORMS[form])
    ours = load_whole(of(folder)).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name].float(), weight), name
    # Each stage expands its own layers alone.
    layers = load_layers(of(folder, stages=2), range(1, 2)).state_dict()
    assert torch.equal(layers["model.layers.0.mlp.up_proj.weight"].float(), theirs["model.layers.1.mlp.up_proj.weight"])
    assert not any("embed_tokens" in name for name in layers)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_float_model(form: str, float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, FORMS[form])
    made = logits(folder, kernels="torch")
    assert torch.equal(made, logits(plain, kernels="torch"))
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)(torch.tensor([TEXT])).logits[0]
    assert torch.equal(made[: len(TEXT)].argmax(-1), reference.argmax(-1))


def test_a_mixture_is_loaded_by_way_of_transformers(float_model: Path, tmp_path: Path) -> None:
    """Its files have a matrix for each expert, the model one for all."""
    mixture = make_mixture(float_model, tmp_path / "mixture")
    folder, plain = quantise(mixture, tmp_path, FORMS["fp8_blocks_of_128"])
    assert any(".experts.0." in name for name in load_file(folder / "model.safetensors"))
    ours = load_whole(of(folder)).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict().items():
        assert torch.equal(ours[name].float(), weight), name
    assert torch.equal(logits(folder), logits(plain))


def test_the_plan_says_what_it_becomes(float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, FORMS["fp8_blocks_of_128"])
    numbers = sum(tensor.numel() for tensor in load_file(plain / "model.safetensors").values())
    said = expanded(VerifierSettings(), folder)
    assert said.startswith("FP8 in blocks of 128 x 128, expanded")
    assert f" {numbers * 4 / 2**20:,.0f} MiB in float32" in said
    assert expanded(VerifierSettings(), plain) == ""


def test_it_drafts(float_model: Path, tmp_path: Path) -> None:
    folder, plain = quantise(float_model, tmp_path, FORMS["fp8_rows"])
    ours, theirs = (load_draft_model(one, plain, device="cpu", dtype="float32").state_dict() for one in (folder, plain))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def change(folder: Path, how: Change) -> None:
    weights = load_file(folder / "model.safetensors")
    how(weights)
    save_file(weights, folder / "model.safetensors")


UP = "model.layers.1.mlp.up_proj"
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


DAMAGE: dict[str, tuple[str, Change, str]] = {
    "no scales": ("fp8_rows", without(SCALE), f"hold no {SCALE}_inv, without which {UP}.weight stands for no numbers"),
    "shape": ("fp8_rows", instead(SCALE, lambda scales: scales[1:]), f"{SCALE} is BF16 [159, 1]"),
    "nan": ("fp8_rows", instead(SCALE, with_nan), f"{SCALE} holds infinite values or NaN"),
    "code": ("fp8_rows", instead(f"{UP}.weight", with_nan), f"{UP}.weight holds infinite values or NaN"),
    "plain": ("fp8_rows", lambda weights: weights.update({k: v.float() for k, v in weights.items()}), "files hold none"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_refused(damage: str, float_model: Path, tmp_path: Path) -> None:
    form, how, says = DAMAGE[damage]
    folder, _ = quantise(float_model, tmp_path, FORMS[form])
    change(folder, how)
    with refuses(ConfigurationError, says=says) as caught:
        load_whole(of(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError):
        load_layers(of(folder, stages=2), range(1, 2))


FIELDS: tuple[tuple[dict[str, object], str, object], ...] = (
    ({"quant_method": "quanto"}, "quant_method", "quanto"),
    ({"bits": 4}, "quant_method", "None"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme", "static"),
    ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt", "e3m4"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size", "[128]"),
)


@pytest.mark.parametrize(("config", "field", "value"), FIELDS, ids=lambda one: str(one))
def test_fields_are_checked(config: dict[str, object], field: str, value: object, float_model: Path, tmp_path: Path) -> None:
    folder, _ = quantise(float_model, tmp_path, FORMS["fp8_rows"])
    configure(folder, quantization_config=config)
    with refuses(ConfigurationError, f"quantization_config.{field}", value):
        load_whole(of(folder))
