"""A block that several layers share: its weights lie in memory once, are planned once, and are replaced everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.config import TargetConfig
from services.verifier.kernels.exact_weights import PackedLinear
from services.verifier.kernels.tied_layers import TiedLayers, twin
from services.verifier.loading.load_model import hollow_model, load_layers, split_layers
from services.verifier.loading.model_size import shape_of
from services.verifier.model import new_weights
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from tests.lossless.hybrids import make_hybrid
from tests.tiny_models.new_weights import other_weights
from tests.tiny_models.weight_versions import as_halves

pytestmark = pytest.mark.xdist_group("hybrids")

# Of four layers the second and the last have it.
SHARED = {"zamba": "shared_transf", "zamba2": "shared_transformer"}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "halves": {"weights": "as_stored"},
    "onednn": {"kernels": "onednn"},
    "int8": {"dtype": "int8"},
}


def config_of(folder: Path, form: str = "float32", **more: Any) -> TargetConfig:
    return TargetConfig(
        model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, threads=1, **{**FORMS[form], **more}
    )


@pytest.fixture(params=["zamba", pytest.param("zamba2", marks=pytest.mark.exhaustive)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_hybrid(request.param, tmp_path / request.param)


def packed(model: nn.Module) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def addresses(layers: list[PackedLinear]) -> set[int]:
    """Where weights lie; those of oneDNN have no address."""
    weights = [layer._weight for layer in layers]
    return {weight.data_ptr() if weight.layout == torch.strided else id(weight) for weight in weights}


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The shared block, as each of its layers has it."""
    found = [getattr(layer, name, None) for layer in model.get_decoder().layers for name in SHARED.values()]
    return [block for block in found if block is not None]


def logits(target: TransformersTarget) -> torch.Tensor:
    """Of a prompt, and of a tree behind it."""
    assert target.open("text", 120)
    text = Rows(request_id="text", context=0, tokens=tuple(range(1, 41)), logits=40)
    tree = Rows(request_id="text", context=40, tokens=(3, 4, 5, 6), parents=(-1, -1, 0), logits=4)
    made = torch.cat([target.forward([rows])[0] for rows in (text, tree)])
    target.close("text")
    return made


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_layers_share_lie_in_memory_once(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "halves":
        as_halves(folder)
    target = TransformersTarget(config_of(folder, form))
    first, second = map(packed, blocks(target._part.model))
    assert len(first) == len(second) > 2 and not {*map(id, first)} & {*map(id, second)}
    assert addresses(first) == addresses(second)
    made = logits(target)
    monkeypatch.setattr(TiedLayers, "made", lambda self, layers, make: make())
    apart = TransformersTarget(config_of(folder, form))
    first, second = map(packed, blocks(apart._part.model))
    assert not addresses(first) & addresses(second)
    assert torch.equal(logits(apart), made)


def test_a_stage_holds_them_once(folder: Path) -> None:
    part = ModelSlice(config_of(folder, stages=2), 1)
    assert len(blocks(part.model)) == 1
    model = load_layers(config_of(folder, stages=2), range(4))
    one, other = (dict(block.named_parameters()) for block in blocks(model))
    assert one and all(other[name] is parameter for name, parameter in one.items())


def test_they_are_planned_once(folder: Path) -> None:
    config = config_of(folder)
    shape, model = shape_of(config), hollow_model(config)
    (block, _), layers = blocks(model), model.get_decoder().layers
    of_block = sum(parameter.numel() for parameter in block.parameters())
    assert shape.shared == shape.again == of_block
    whole = sum(parameter.numel() for parameter in model.parameters())
    tied = shape.embeddings if model.config.tie_word_embeddings else 0
    assert shape.weights(config) == pytest.approx(4 * (whole + tied), abs=4 * len(layers))
    # Each layer reads it.
    assert shape.multiplied(config) == pytest.approx(whole + tied + of_block - shape.embeddings, abs=len(layers))
    # Both stages have a layer with it.
    split, held = replace(config, stages=2), []
    for own in split_layers(split):
        parameters = {id(each): each.numel() for each in load_layers(split, own).get_decoder().layers.parameters()}
        held.append(sum(parameters.values()))
    assert 2 * shape.per_layer + shape.shared == pytest.approx(max(held), abs=len(layers))
    assert shape.weights(split) - shape.weights(config) == pytest.approx(-4 * 2 * shape.per_layer)


def _twice(served: PreTrainedModel, model: PreTrainedModel, place: Path) -> Iterator[Any]:
    """Numbers that are shared are exchanged for each of their places, so the first ones are lost."""
    seen = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_weights, "_key", lambda held: next(seen))
        yield from _pairs(served, model, place)


def _in_one_place(served: PreTrainedModel, model: PreTrainedModel, place: Path) -> Iterator[Any]:
    """A tensor that is shared is put into the first of its places alone."""
    seen = set[int]()
    for pair in _pairs(served, model, place):
        if id(own := getattr(pair.module, pair.name)) not in seen:
            seen.add(id(own))
            yield pair


_pairs = new_weights._pairs


@pytest.mark.parametrize(
    ("form", "fault"),
    [
        *((form, None) for form in FORMS),
        ("float32", _twice),
        ("onednn", _in_one_place),
    ],
)
def test_all_layers_get_new_weights(folder: Path, form: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    other = other_weights(folder, folder.parent / "other")
    if form == "halves":
        as_halves(folder)
        as_halves(other)
    target, wanted = TransformersTarget(config_of(folder, form)), logits(TransformersTarget(config_of(other, form)))
    before = logits(target)
    if fault is not None:
        monkeypatch.setattr(new_weights, "_pairs", fault)
    new = target.new_weights(config_of(other, form))
    target.exchange(new)
    replaced = torch.equal(logits(target), wanted)
    target.exchange(new)
    assert (replaced and torch.equal(logits(target), before)) == (fault is None)
    assert not torch.equal(wanted, before)


def test_a_twin_has_hooks_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    other, calls = twin(module), []
    other.register_forward_hook(lambda *_: calls.append("outside"))
    other[0].register_forward_hook(lambda *_: calls.append("inside"))
    rows = torch.randn(2, 4)
    assert torch.equal(module(rows), other(rows)) and calls == ["inside", "outside"]
    assert other[0].weight is module[0].weight and other[0] is not module[0]
    other[0] = nn.Identity()
    assert isinstance(module[0], nn.Linear)
