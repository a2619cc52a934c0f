"""FP8 that files store as one tensor for all experts of a layer: kept in blocks, with the bits of the float model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.checks.model_files import expanded
from cluster.settings.components import VerifierSettings
from services.verifier.loading.load_model import load_whole
from services.verifier.model.slice import ModelSlice
from speculation.errors import ConfigurationError
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_quantised import numbers, of
from tests.lossless.test_quantised_mixtures import EXPERTS, same_bits
from tests.lossless.test_tensor_parallel import config, passes
from tests.running.refusals import refuses
from tests.tiny_models.fused_experts import make_fused

pytestmark = needs_kernels

FILE = "model.safetensors"
# What the models multiply by: outputs first, or inputs.
FORMS = [
    ("qwen3_moe", "blocks"),
    ("gpt_oss", "blocks"),
    ("llama4", "columns"),
    *(
        pytest.param(*form, marks=pytest.mark.exhaustive)
        for form in (
            ("qwen3_moe", "rows"), ("qwen3_moe", "experts"), ("qwen3_moe", "halves"), ("gpt_oss", "columns"),
            ("gpt_oss", "experts"), ("llama4", "blocks"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "scales"), FORMS)
def test_all_experts_of_one_tensor_stay_in_blocks(kind: str, scales: str, tmp_path: Path) -> None:
    folder, plain = make_fused(kind, scales, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    for weights in ("as_stored", "float32"):
        ours = load_whole(of(folder, weights=weights))
        for name, weight in theirs.items():
            assert torch.equal(numbers(ours, name), weight), (name, weights)
    assert same_bits(folder, plain) == {name: {"E4M3"} for name in EXPERTS}
    assert "linear layers and experts multiplied as E4M3" in expanded(VerifierSettings(), folder)


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)])
def test_ranks_hold_outputs_of_all_experts(kind: str, tmp_path: Path) -> None:
    folder, plain = make_fused(kind, "blocks", tmp_path)
    alone = passes(ModelSlice(config(plain, weights="float32"), 0))
    parts = ranks_of(config(folder, 2, weights="as_stored"))
    assert all(torch.equal(made, alone) for made in together(parts, passes))
    packed = [part.model.get_decoder().layers[0].mlp.experts.down_proj.numbers.packed for part in parts]
    assert all({(one.stored_as, one.out_features) for one in some} == {("E4M3", 64)} for some in packed)


def test_scales_that_vary_along_the_inputs_become_float32(tmp_path: Path) -> None:
    """Inputs first, with a scale for each of them: no block holds that."""
    folder, plain = make_fused("gpt_oss", "rows", tmp_path)
    assert same_bits(folder, plain) == {name: {"float32"} for name in EXPERTS}


@pytest.mark.parametrize("damage", ["shape", "missing", "nan"])
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    folder, _ = make_fused("qwen3_moe", "blocks", tmp_path)
    stored = load_file(folder / FILE)
    name = "model.layers.1.mlp.experts.down_proj"
    if damage == "shape":
        stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"][:, 1:].contiguous()
    elif damage == "missing":
        del stored[f"{name}_scale_inv"]
    else:
        stored[name].view(torch.uint8)[3, 4, 5] = 0x7F
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    says = {"shape": f"{name}_scale_inv is F32 [6, 3, 2]", "missing": f"hold no {name}_scale_inv", "nan": "infinite"}
    with refuses(ConfigurationError, says=says[damage]) as caught:
        load_whole(of(folder))
    assert "\n" not in str(caught.value)
