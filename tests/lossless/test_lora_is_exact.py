"""LoRA adapters in the target: a row's logits are the same bits alone, beside other adapters and beside none, in any tree and
any chunking; and they are PEFT's own up to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.verifier.config import TargetConfig
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.library import library
from services.verifier.kernels.native.low_rank_kernel import AddLowRank, LowRank, PackedLowRank
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model import fused_layers
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from tests.engine.layouts import in_one_process
from tests.lossless.test_target_is_exact import tree_around
from tests.tiny_models.lora import WITH_ENDS, make_adapter

# One process, since the targets are shared.
pytestmark = pytest.mark.xdist_group("lora is exact")

LENGTH = 100
NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of two adapters: the second one has other ranks, other modules, another scale, and numbers of another type."""
    folder = tmp_path_factory.mktemp("adapters")
    ranks = {"model.layers.0.self_attn.q_proj": 19}
    targets = ("q_proj", "v_proj", "up_proj")
    return {
        "one": make_adapter(folder / "one", tiny_model, seed=1, targets=WITH_ENDS),
        "two": make_adapter(folder / "two", tiny_model, seed=2, rank=3, ranks=ranks, targets=targets, use_rslora=True, dtype=torch.bfloat16,
                            alpha_pattern={"v_proj": 4}),
    }  # fmt: skip


def target_with(model: Path, adapters: dict[str, Path], allowed: tuple[Path, ...] = ()) -> TransformersTarget:
    modules = {name: str(folder) for name, folder in adapters.items()}
    return TransformersTarget(
        TargetConfig(
            model_path=str(model), kv_cache_tokens=2048, max_model_len=512, lora_modules=modules, lora_folders=allowed
        )
    )  # fmt: skip


@pytest.fixture(scope="module", params=["whole layers", "modules"], autouse=True)
def layers(request: pytest.FixtureRequest) -> Iterator[str]:
    """Layers that one kernel computes, and layers whose parts are computed one by one."""
    if library("auto") is None:
        pytest.skip("no kernels of our own can be compiled here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "modules":
            patch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
        yield request.param


@pytest.fixture(scope="module")
def target(
    tiny_model: Path,
    folders: dict[str, Path],
    layers: str,
    target_layout: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> TransformersTarget:
    # Ranks look by themselves whether they may read a folder.
    return target_with(tiny_model, folders, (tmp_path_factory.getbasetemp(),))


@pytest.fixture(scope="module")
def text(target: TransformersTarget) -> list[int]:
    source = random.Random(1)
    return [source.randrange(target.vocab_size) for _ in range(LENGTH)]


def alone_in(target: TransformersTarget, adapter: str, text: list[int]) -> torch.Tensor:
    """Logits of plain decoding, one token per pass: [tokens, vocabulary]."""
    assert target.open("alone", len(text), Prefix(tokens=text, adapter=adapter))
    rows = [Rows(request_id="alone", context=at, tokens=(token,), logits=1) for at, token in enumerate(text)]
    found = [target.forward([each])[0][0] for each in rows]
    target.close("alone")
    return torch.stack(found)


@pytest.fixture(scope="module")
def alone(tiny_model: Path, folders: dict[str, Path], layers: str, text: list[int]) -> dict[str, torch.Tensor]:
    with in_one_process():
        target = target_with(tiny_model, folders)
    return {name: alone_in(target, name, text) for name in NAMES}


def test_layers_are_computed_as_the_case_says(target: TransformersTarget, layers: str) -> None:
    decoder = target._part.model.get_decoder()
    assert {isinstance(layer.forward, FusedLayer) for layer in decoder.layers} == {layers == "whole layers"}


def test_a_server_with_one_adapter_gives_the_same_bits(
    tiny_model: Path, folders: dict[str, Path], text: list[int], alone: dict[str, torch.Tensor]
) -> None:
    for name in ("one", "two"):
        only = target_with(tiny_model, {name: folders[name]})
        assert torch.equal(alone_in(only, name, text[:20]), alone[name][:20])
    plain = TransformersTarget(TargetConfig(model_path=str(tiny_model), kv_cache_tokens=2048, max_model_len=512))
    assert torch.equal(alone_in(plain, "", text[:20]), alone[""][:20])


def untied(model: Path) -> PreTrainedModel:
    """The model, whose output layer has a copy of the embedding: PEFT merges an adapter of one into both otherwise."""
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, tie_word_embeddings=False)
    made.lm_head.weight = torch.nn.Parameter(made.get_input_embeddings().weight.detach().clone())
    return made


@pytest.mark.parametrize("name", ["one", "two"])
def test_logits_are_those_of_peft(
    tiny_model: Path, folders: dict[str, Path], text: list[int], alone: dict[str, torch.Tensor], name: str
) -> None:
    peft = pytest.importorskip("peft")
    base = untied(tiny_model)
    adapted = peft.PeftModel.from_pretrained(base, folders[name]).eval()
    with torch.inference_mode():
        own = adapted(torch.tensor([text])).logits[0]
        merged = adapted.merge_and_unload()(torch.tensor([text])).logits[0]
    size = own.abs().max()
    assert (alone[name] - alone[""]).abs().max() > 0.1 * size
    for expected in (own, merged):
        assert torch.allclose(alone[name], expected, atol=1e-4 * float(size))
        assert torch.equal(alone[name].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("size", [1, 7, 65, LENGTH])
def test_any_chunking_beside_others(
    target: TransformersTarget, text: list[int], alone: dict[str, torch.Tensor], size: int
) -> None:
    """Prompts of both adapters and of none go through the same passes, in another order each time."""
    for name in NAMES:
        assert target.open(f"of {name}", LENGTH, Prefix(tokens=text, adapter=name))
    found: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    order = list(NAMES)
    for start in range(0, LENGTH, size):
        part = tuple(text[start : start + size])
        random.Random(start).shuffle(order)
        batch = [Rows(request_id=f"of {name}", context=start, tokens=part, logits=len(part)) for name in order]
        for name, logits in zip(order, target.forward(batch), strict=True):
            found[name].append(logits)
    for name in NAMES:
        target.close(f"of {name}")
        assert torch.equal(torch.cat(found[name]), alone[name]), name


def test_trees_beside_others(target: TransformersTarget, text: list[int], alone: dict[str, torch.Tensor]) -> None:
    source = random.Random(2)
    for name in NAMES:
        assert target.open(f"of {name}", LENGTH + 32, Prefix(tokens=text, adapter=name))
        target.forward([Rows(request_id=f"of {name}", context=0, tokens=tuple(text[:60]), logits=0)])
    for position in range(60, LENGTH - 5):
        batch, paths = [], []
        for name in NAMES:
            tokens, parents, path = tree_around(text, position + 1, source, target.vocab_size)
            own = (text[position], *tokens)
            rows = Rows(
                request_id=f"of {name}", context=position, tokens=own, parents=tuple(parents), logits=1 + len(tokens)
            )
            batch.append(rows)
            paths.append([0, *(node + 1 for node in path)])
        for name, logits, rows_of_text in zip(NAMES, target.forward(batch), paths, strict=True):
            assert torch.equal(logits[rows_of_text], alone[name][position : position + len(rows_of_text)]), name
        for rows in batch:
            target.keep(rows.request_id, position, [0])
    for name in NAMES:
        target.close(f"of {name}")


def test_a_prefix_is_shared_with_the_same_adapter_alone(target: TransformersTarget, text: list[int]) -> None:
    def cached(adapter: str, salt: str = "") -> int:
        assert target.open("next", LENGTH, Prefix(tokens=text, tenant="t", salt=salt, adapter=adapter))
        found = target.computed("next")
        target.close("next")
        return found

    assert target.open("first", LENGTH, Prefix(tokens=text, tenant="t", adapter="one"))
    target.forward([Rows(request_id="first", context=0, tokens=tuple(text), logits=1)])
    target.keep("first", 0, range(LENGTH))
    target.close("first")
    assert (cached("one"), cached("two"), cached(""), cached("one", "salt")) == (BLOCK, 0, 0, 0)
    assert cached("", target.adapters["one"]) == 0


def test_what_is_loaded_again_is_not_what_was(
    target: TransformersTarget, tiny_model: Path, text: list[int], alone: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Under the name of an adapter that was unloaded there may be another one: nothing of the old one is left."""
    kept = target.adapters["one"]
    target.load_adapter("again", make_adapter(tmp_path / "first", tiny_model, seed=5))
    first, digest = alone_in(target, "again", text[:70]), target.adapters["again"]
    target.unload_adapter("again")
    assert "again" not in target.adapters and target.adapters["one"] == kept
    target.load_adapter("again", make_adapter(tmp_path / "second", tiny_model, seed=6))
    assert target.adapters["again"] != digest
    assert not torch.equal(alone_in(target, "again", text[:70]), first)
    assert torch.equal(alone_in(target, "one", text[:20]), alone["one"][:20])
    target.unload_adapter("again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(1, 5, 3), (16, 64, 32), (19, 70, 261), (256, 40, 515)])
def test_a_product_is_its_formula_and_no_row_changes_another(
    rank: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    kernels = library("auto")
    assert kernels is not None
    generator = torch.Generator().manual_seed(rank)
    down, up = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rank, inputs), (outputs, rank)))
    given, before = (torch.randn(33, count, generator=generator) for count in (inputs, outputs + 4))
    add, packed = AddLowRank(kernels), PackedLowRank(LowRank(down=down, up=up, scale=0.3))
    together = before.clone()
    # A part of wider rows, as those of layers that share a product.
    add(packed, given, together[:, 2 : 2 + outputs])
    expected = before.double()
    expected[:, 2 : 2 + outputs] += 0.3 * given.double() @ down.double().T @ up.double().T
    assert torch.allclose(together.double(), expected, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(together[:, :2], before[:, :2]) and torch.equal(together[:, 2 + outputs :], before[:, 2 + outputs :])
    for row in range(33):
        one = before[row : row + 1].clone()
        add(packed, given[row : row + 1], one[:, 2 : 2 + outputs])
        assert torch.equal(one[0], together[row])
