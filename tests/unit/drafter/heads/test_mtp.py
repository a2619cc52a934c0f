"""MTP layers of every public layout and of every kind of decoder layer compute what their formulas say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.drafter.heads.eagle.head import causal
from services.drafter.heads.files.target_rows import read_target_rows
from services.drafter.heads.mtp.files import load_mtp
from services.model_files.mtp_layers import find_mtp
from tests.tiny_models import mtp_layers as made
from tests.tiny_models.head_checkpoints import HIDDEN, VOCABULARY
from tests.tiny_models.mtp_layers import LAYOUTS, Tensors

pytestmark = pytest.mark.usefixtures("seeded")

ROWS = 6
Outputs = tuple[torch.Tensor, torch.Tensor]


def far(
    folder: Path,
    target: Path,
    reference: Callable[[torch.Tensor, torch.Tensor], Outputs],
    dtype: torch.dtype = torch.float64,
) -> float:
    """How far the layer's outputs are from what the reference makes of the same embeddings and states."""
    tokens, states = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS, HIDDEN, dtype=dtype)
    hidden, state = reference(read_target_rows(target, dtype=dtype).embedding.rows(tokens), states)
    head = load_mtp(folder, target, dtype=dtype)
    found = head(head.embed(tokens)[None], head.fuse(states)[None], torch.arange(ROWS)[None], causal)
    return max(float((found.hidden[0] - hidden).abs().max()), float((found.state[0] - state).abs().max()))


def formulas(tensors: Tensors, **how: Any) -> Callable[[torch.Tensor, torch.Tensor], Outputs]:
    weights = {name: each.double() for name, each in tensors.items()}
    return lambda embeddings, states: made.forward(weights, embeddings, states, **how)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_in_the_targets_folder_computes_its_formulas(tmp_path: Path, layout: str) -> None:
    layer = made.dense_layer()
    target = made.add_to(made.make_target(tmp_path), made.named(layer, layout), num_nextn_predict_layers=1)
    if layout == "ernie":
        del layer["norm.weight"]
    assert far(target, target, formulas(layer, state_first=layout == "mimo")) < 2e-6


def speculators(folder: Path, layer: Tensors, target: Path, **fields: Any) -> Path:
    """A folder as the speculators library writes it: MiMo's names, and the embedding first."""
    folder.mkdir()
    save_file(
        {name.removeprefix("model."): each for name, each in made.named(layer, "mimo").items()}, folder / "m.safetensors"
    )
    (folder / "m.safetensors").rename(folder / "model.safetensors")
    config = {
        "speculators_model_type": "mtp",
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": json.loads((target / "config.json").read_text()),
        "speculators_config": {"algorithm": "mtp", "proposal_methods": [{"verifier_accept_k": 1, "accept_tolerance": 0.0}]},
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_speculators_layout_reads_the_embedding_first(tmp_path: Path) -> None:
    target, layer = made.make_target(tmp_path / "target"), made.dense_layer()
    assert far(speculators(tmp_path / "own", layer, target), target, formulas(layer)) < 2e-6
    swapped = speculators(tmp_path / "swapped", layer, target, mtp_hidden_states_first=True)
    assert far(swapped, target, formulas(layer, state_first=True)) < 2e-6


def shifted(reference: Callable[[torch.Tensor, torch.Tensor], Outputs]) -> Callable[[torch.Tensor, torch.Tensor], Outputs]:
    return lambda embeddings, states: reference(embeddings, states.roll(1, 0))


def swapped_norms(layer: Tensors) -> Tensors:
    return {**layer, "embed_norm.weight": layer["state_norm.weight"], "state_norm.weight": layer["embed_norm.weight"]}


FAULTS: Mapping[str, Callable[[Tensors], Callable[[torch.Tensor, torch.Tensor], Outputs]]] = {
    "order": lambda layer: formulas(layer, state_first=True),
    "norms": lambda layer: formulas(swapped_norms(layer)),
    "norm left out": lambda layer: formulas({name: each for name, each in layer.items() if name != "norm.weight"}),
    "rope": lambda layer: formulas(layer, theta=10_000.0),
    "position": lambda layer: shifted(formulas(layer)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_far_from_the_formulas(tmp_path: Path, fault: str) -> None:
    layer = made.dense_layer()
    target = made.add_to(made.make_target(tmp_path), made.named(layer, "deepseek"))
    assert far(target, target, FAULTS[fault](layer)) > 1e-3


@pytest.mark.examples(2)
@pytest.mark.parametrize("kind", made.KINDS)
def test_every_kind_of_layer_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    of_kind = made.make_of_kind(kind, tmp_path)
    decoder, number, around = of_kind.like.model, of_kind.number, of_kind.around

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        of_its_kind = type(decoder.norm)(HIDDEN, eps=decoder.config.rms_norm_eps)
        of_its_kind.weight.data = around[f"{name}.weight"]
        return of_its_kind(rows)

    @torch.no_grad()
    def reference(embeddings: torch.Tensor, states: torch.Tensor) -> Outputs:
        pair = norm(embeddings, "embed_norm"), norm(states, "state_norm")
        rows = (torch.cat(pair[::-1] if of_kind.layout == "mimo" else pair, -1) @ around["fc.weight"].T)[None]
        places, mask = torch.arange(ROWS)[None], torch.full((ROWS, ROWS), -torch.inf).triu(1)[None, None]
        turns = decoder.rotary_emb(rows, places)
        rows = decoder.layers[number](rows, attention_mask=mask, position_ids=places, position_embeddings=turns)[0]
        hidden = rows if of_kind.layout == "ernie" else norm(rows, "norm")
        return hidden, hidden

    # Grouped products of experts take no float64.
    assert far(of_kind.target, of_kind.target, reference, torch.float32) < 1e-4


def test_mimos_own_type_has_the_layers_of_qwen2(tmp_path: Path) -> None:
    target = made.make_of_kind("qwen2", tmp_path / "target").target
    own = made.add_to(shutil.copytree(target, tmp_path / "own"), {}, model_type="mimo")
    expected = load_mtp(target, target).layers.state_dict()
    found = load_mtp(own, target).layers.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


def test_other_tensors_belong_to_no_mtp_layer() -> None:
    assert find_mtp(["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "fc.weight"]) is None
    found = find_mtp([*made.named(made.dense_layer(), "deepseek"), "model.layers.0.self_attn.q_proj.weight"])
    assert found is not None and [each.number for each in found.layers] == [made.LAYERS]
    assert found.layers[0].names["block.mlp.up_proj.weight"] == "model.layers.2.mlp.up_proj.weight"
    assert "model.layers.0.self_attn.q_proj.weight" not in found.every
