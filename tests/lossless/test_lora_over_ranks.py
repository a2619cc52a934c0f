"""LoRA adapters of a target whose layers are split over ranks: the bits of one process, and every rank has an adapter or none
has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from services.verifier.config import TargetConfig, check_backends
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.low_rank_kernel import LowRank
from services.verifier.loading.peft_folder import StoredAdapter, read_adapter
from services.verifier.model import lora_adapters
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from services.verifier.stages import split_adapters
from services.verifier.stages.stage_ranks import Cut
from speculation.errors import ConfigurationError, TargetLost
from tests.engine.stage_threads import parts_noted, targets_of_ranks
from tests.engine.virtual_ranks import ranks_of, together
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import test_tensor_parallel as parallel
from tests.lossless.test_lora_in_stages import computed_as, config, passes, same
from tests.running.refusals import refuses
from tests.tiny_models.lora import ALL, WITH_ENDS, make_adapter
from tests.tiny_models.tiny import make_tiny_model

# One process, since the targets are shared.
pytestmark = [
    pytest.mark.xdist_group("lora over ranks"),
    needs_kernels,
]

# Every linear layer, both ends, one place alone, ranks that fill no vector, numbers of two bytes.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"targets": WITH_ENDS},
    "halves": {"targets": WITH_ENDS, "rank": 3, "dtype": torch.bfloat16},
    "layers": {"rank": 19},
    "embedding": {"targets": ("embed_tokens",)},
    "output": {"targets": ("lm_head", "o_proj")},
    "attention": {"targets": ("q_proj", "k_proj", "v_proj"), "ranks": {"model.layers.1.self_attn.q_proj": 17}},
    "behind heads": {"targets": ("o_proj",), "use_rslora": True},
    "last": {"targets": ("down_proj", "gate_proj")},
}
NAMES = ("", *ADAPTERS)
# Ranks, stages.
SPLITS = [(2, 1), (4, 1), (2, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **{**parallel.SIZES, "num_hidden_layers": 2})


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    return {
        name: str(make_adapter(made / name.replace(" ", "_"), model, seed=seed, **how))
        for seed, (name, how) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module", params=["whole layers", pytest.param("modules", marks=pytest.mark.exhaustive)])
def layers(request: pytest.FixtureRequest) -> Iterator[str]:
    """Layers that one kernel computes, and layers whose parts are computed one by one."""
    with computed_as(request.param):
        yield request.param


@pytest.fixture(scope="module")
def whole(model: Path, folders: dict[str, str], layers: str) -> TransformersTarget:
    return TransformersTarget(config(model, 1, lora_modules=folders))


@pytest.fixture(scope="module")
def wanted(whole: TransformersTarget) -> dict[str, torch.Tensor]:
    return passes(whole, *NAMES)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[ModelSlice]:
    return parts_noted(monkeypatch)


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., TransformersTarget]]:
    with targets_of_ranks(partial(config, model)) as of:
        yield of


@pytest.mark.examples(2)
@pytest.mark.parametrize(("ranks", "stages"), SPLITS, ids=str)
def test_the_same_bits_as_in_one_process(
    make: Callable[..., TransformersTarget], folders: dict[str, str], whole: TransformersTarget, wanted: dict[str, torch.Tensor],
    parts: list[ModelSlice], layers: str, ranks: int, stages: int,
) -> None:  # fmt: skip
    """Eight adapters and none in each pass, prompts and trees."""
    assert len({tuple(each.flatten().tolist()) for each in wanted.values()}) == len(NAMES)
    split = make(ranks, stages, lora_modules=folders)
    of_layers = [layer for part in (split._part, *parts) for layer in part.model.get_decoder().layers]
    assert len(of_layers) == 2 * ranks
    assert {isinstance(layer.forward, FusedLayer) for layer in of_layers} == {layers == "whole layers"}
    assert split.adapters == whole.adapters
    assert same(passes(split, *NAMES), wanted)
    for name in ("", "all", "last"):
        assert torch.equal(passes(split, name)[name], wanted[name])


def test_what_may_be_adapted_is_told_of_whole_layers(
    make: Callable[..., TransformersTarget], folders: dict[str, str], whole: TransformersTarget, parts: list[ModelSlice]
) -> None:
    split = make(2, 2, lora_modules={"all": folders["all"]})
    known = [part.adapters for part in (split._part, *parts)]
    assert len(known) == 4
    for adapters in known:
        assert adapters is not None and whole._part.adapters is not None
        assert list(adapters.layers.items()) == list(whole._part.adapters.layers.items())


def test_a_rank_holds_no_outputs_of_another(make: Callable[..., TransformersTarget], folders: dict[str, str]) -> None:
    split = make(4, lora_modules={"all": folders["all"]})
    adapters = split._part.adapters
    assert adapters is not None
    outputs = {name: cut.held for name, cut in adapters._cuts.items() if name.startswith("model.layers.1.")}
    assert {name.rpartition(".")[2]: count for name, count in outputs.items()} == {
        "q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32, "gate_proj": 64, "up_proj": 64, "down_proj": 32,
    }  # fmt: skip
    assert adapters._cuts["lm_head"] == adapters._cuts["model.embed_tokens"] == Cut(ranges=(range(240, 320),), whole=320)


@pytest.mark.examples(3)
@pytest.mark.parametrize("name", ["layers", "embedding", "output"])
def test_parts_of_another_rank_are_seen(
    make: Callable[..., TransformersTarget], folders: dict[str, str], wanted: dict[str, torch.Tensor], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A planted fault: columns shifted by one rank."""
    right = lora_adapters._part_of

    def shifted(product: LowRank, cut: Cut | None, *, of_tokens: bool) -> LowRank:
        assert cut is not None
        begin = cut.ranges[0].stop % cut.whole
        return right(product, replace(cut, ranges=(range(begin, begin + cut.held),)), of_tokens=of_tokens)

    monkeypatch.setattr(lora_adapters, "_part_of", shifted)
    found = passes(make(2, lora_modules={name: folders[name]}), "", name)
    assert torch.equal(found[""], wanted[""]) and not torch.equal(found[name], wanted[name])


def test_one_is_loaded_while_passes_run_and_another_takes_its_name(
    make: Callable[..., TransformersTarget], folders: dict[str, str], whole: TransformersTarget, wanted: dict[str, torch.Tensor]
) -> None:  # fmt: skip
    split = make(2, lora_modules={"halves": folders["halves"]}, lora_folders=(Path(folders["all"]).parent,))
    loading = threading.Thread(target=split.load_adapter, args=("all", Path(folders["all"])))
    loading.start()
    before = passes(split, "", "halves")
    while loading.is_alive():
        assert same(passes(split, "", "halves"), before)
    assert same(before, {name: wanted[name] for name in ("", "halves")})
    assert same(passes(split, "", "all"), {name: wanted[name] for name in ("", "all")})
    assert split.adapters == {name: whole.adapters[name] for name in ("halves", "all")}
    split.unload_adapter("all")
    split.load_adapter("all", Path(folders["layers"]))
    assert torch.equal(passes(split, "halves", "all")["all"], wanted["layers"])


@pytest.mark.examples(2)
@pytest.mark.parametrize(("fault", "says"), [("memory", "rank 1 of stage 0: "), ("another", "another adapter")])
def test_where_one_rank_cannot_load_it_none_keeps_it(
    make: Callable[..., TransformersTarget], folders: dict[str, str], whole: TransformersTarget, wanted: dict[str, torch.Tensor],
    parts: list[ModelSlice], monkeypatch: pytest.MonkeyPatch, fault: str, says: str,
) -> None:  # fmt: skip
    def reading(folder: Path, *given: Any) -> StoredAdapter:
        if threading.current_thread().name.startswith("adapter of stage 1") and fault == "memory":
            raise MemoryError("no room for 5 GiB")
        found = read_adapter(folder, *given)
        return replace(found, digest="another") if fault == "another" else found

    split = make(4, lora_modules={"last": folders["last"]}, lora_folders=(Path(folders["all"]).parent,))
    with monkeypatch.context() as patch:
        patch.setattr(split_adapters, "read_adapter", reading)
        with refuses(ConfigurationError, says=says):
            split.load_adapter("all", Path(folders["all"]))
    # What is to be dropped is told behind the question, so it is done by the time of the next answer.
    split.beat()
    split.beat()
    held = [part.adapters.digests.values() for part in (split._part, *parts) if part.adapters is not None]
    assert len(held) == 4 and all(list(each) == [whole.adapters["last"]] for each in held)
    split.load_adapter("all", Path(folders["all"]))
    assert torch.equal(passes(split, "all")["all"], wanted["all"])


def test_ranks_that_disagree_on_an_adapter_notice(model: Path, folders: dict[str, str]) -> None:
    adapters = {name: Path(folders[name]) for name in ("all", "last")}
    first, _ = made = with_adapters(model, adapters, 2)

    def run(part: ModelSlice) -> None:
        assert part.adapters is not None
        part.pool.assign("a", [0], 1)
        part.adapters.assign("a", "all" if part is first else "last")
        with pytest.raises(TargetLost, match="disagree"):
            part.run([Rows(request_id="a", context=0, tokens=(5,), logits=1)], None)

    together(made, run)


def test_a_target_that_is_rebuilt_has_its_adapters(
    make: Callable[..., TransformersTarget], folders: dict[str, str], wanted: dict[str, torch.Tensor], parts: list[ModelSlice]
) -> None:  # fmt: skip
    split = make(2, lora_modules={"last": folders["last"]}, lora_folders=(Path(folders["all"]).parent,))
    split.load_adapter("all", Path(folders["all"]))
    assert split.open("a", 100, Prefix(tokens=(1, 2, 3), adapter="all"))
    split.recover()
    assert parts[-1].adapters is not None and len(parts[-1].adapters.digests) == 2
    assert same(passes(split, "", "all", "last"), {name: wanted[name] for name in ("", "all", "last")})


def with_adapters(folder: Path, adapters: dict[str, Path], ranks: int, **options: object) -> list[ModelSlice]:
    """All ranks, with an adapter for each of two requests, a and b."""
    wanted = parallel.config(folder, ranks, lora_folders=(folder.parent,), **options)
    made = ranks_of(wanted) if ranks > 1 else [ModelSlice(wanted, 0)]
    for part in made:
        assert part.adapters is not None
        for request, (name, where) in zip("ab", adapters.items(), strict=True):
            part.adapters.add(name, read_adapter(where, part.adapters.layers, folder))
            part.adapters.assign(request, name)
    return made


def check(folder: Path, ranks: int, unrounded: Path | None = None, **options: object) -> None:
    """Check that ranks have the bits of one process, and that these are not those of the model itself.

    Args:
        unrounded: another folder of the model, which transformers reads.
    """
    base = unrounded or folder
    adapters = {
        "one": make_adapter(folder.parent / "one", base, seed=1, targets=WITH_ENDS),
        "two": make_adapter(folder.parent / "two", base, seed=2, rank=21, targets=ALL),
    }
    [alone] = map(parallel.passes, with_adapters(folder, adapters, 1, **options))
    assert not torch.equal(alone, parallel.passes(ModelSlice(parallel.config(folder, **options), 0)))
    split = with_adapters(folder, adapters, ranks, **options)
    assert all(torch.equal(each, alone) for each in together(split, parallel.passes))


@pytest.mark.examples(2)
@pytest.mark.parametrize("kind", parallel.KINDS)
def test_the_same_bits_for_other_models(kind: str, tmp_path: Path) -> None:
    made, configured, others = parallel.KINDS[kind]
    torch.manual_seed(0)
    folder = tmp_path / "model"
    made(configured(**{**parallel.SIZES, "max_position_embeddings": 512, "pad_token_id": 0, **others})).save_pretrained(
        folder
    )
    check(folder, 2)


@pytest.mark.examples(2)
@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"weights": "as_stored"}], ids=str)
def test_the_same_bits_of_weights_in_fewer_bits_and_of_shared_key_heads(
    model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    stored = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(stored)
    check(stored, 8, **options)


def test_a_target_of_ranks_may_have_adapters() -> None:
    wanted = TargetConfig(model_path="unused", lora_modules={"one": "/one"}, stages=2, tensor_parallel_size=2)
    check_backends(wanted)
