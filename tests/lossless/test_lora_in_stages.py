"""LoRA adapters of a target that is split over pipeline stages: the bits of one process, and every stage has an adapter or
none has it.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from services.verifier.config import TargetConfig
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.loading.peft_folder import StoredAdapter, read_adapter
from services.verifier.model import fused_layers
from services.verifier.model.embedded_rows import EmbeddedRows
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows
from services.verifier.stages import split_adapters
from speculation.errors import ConfigurationError
from tests.engine.stage_threads import launch_thread, parts_noted
from tests.kernels.kernels_here import needs_kernels
from tests.lossless import architectures
from tests.lossless.hybrids import make_hybrid
from tests.lossless.test_target_is_exact import tree_around
from tests.running.refusals import refuses
from tests.tiny_models.lora import CONFIG, WEIGHTS, WITH_ENDS, make_adapter, read_config, write_config
from tests.tiny_models.tiny import make_tiny_model

# One process, since the targets are shared.
pytestmark = [
    pytest.mark.xdist_group("lora in stages"),
    needs_kernels,
]

LAYERS = 4
# "late" adapts a layer of the last stage alone.
NAMES = ("", "one", "two", "late")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of adapters: of everything; of some modules, with another rank in a layer whose number is another one in its stage."""
    made, ranks = tmp_path_factory.mktemp("adapters"), {f"model.layers.{LAYERS - 1}.self_attn.q_proj": 19}
    make_adapter(made / "one", model, seed=1, targets=WITH_ENDS)
    make_adapter(
        made / "two", model, seed=2, rank=3, ranks=ranks, targets=("q_proj", "v_proj", "up_proj"), dtype=torch.bfloat16
    )
    late = make_adapter(made / "late", model, seed=3)
    kept = {name: each for name, each in load_file(late / WEIGHTS).items() if f".layers.{LAYERS - 1}." in name}
    save_file(kept, late / WEIGHTS)
    write_config(late, {**read_config(late), "layers_to_transform": [LAYERS - 1]})
    return {name: str(made / name) for name in NAMES if name}


def config(model: Path, stages: int, **options: object) -> TargetConfig:
    return TargetConfig(
        model_path=str(model),
        threads=1,
        stages=stages,
        **{"kv_cache_tokens": 2048, "max_model_len": 512, **options},  # type: ignore[arg-type]
    )


@contextmanager
def computed_as(layers: str) -> Iterator[None]:
    """Targets that are made within it compute whole layers by one kernel, or their modules one by one."""
    with pytest.MonkeyPatch.context() as patch:
        if layers == "modules":
            patch.setattr(fused_layers, "fuse", lambda *_: (0, "of the test"))
        yield


@pytest.fixture(scope="module", params=["whole layers", "modules"])
def layers(request: pytest.FixtureRequest) -> Iterator[str]:
    """Layers that one kernel computes, and layers whose parts are computed one by one."""
    with computed_as(request.param):
        yield request.param


@pytest.fixture(scope="module")
def whole(model: Path, folders: dict[str, str], layers: str) -> TransformersTarget:
    return TransformersTarget(config(model, 1, lora_modules=folders))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[ModelSlice]:
    return parts_noted(monkeypatch)


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., TransformersTarget]]:
    """Makes targets of stages in threads."""
    made: list[TransformersTarget] = []

    def of(stages: int, folder: Path = model, **options: object) -> TransformersTarget:
        made.append(TransformersTarget(config(folder, stages, **options), launch_thread))
        return made[-1]

    yield of
    for target in made:
        target.shutdown()


def passes(target: TransformersTarget, *names: str) -> dict[str, torch.Tensor]:
    """Chunks of a prompt, a tree, and what follows of it, with these adapters in one pass: the logits of all rows, by adapter."""
    source = random.Random(1)
    text = [source.randrange(target.vocab_size) for _ in range(90)]
    order, made = list(names), {name: list[torch.Tensor]() for name in names}

    def run(of: Callable[[str], Rows], kept: list[int]) -> None:
        random.Random(len(made[order[0]])).shuffle(order)
        batch = [of(f"of {name}") for name in order]
        for name, rows, logits in zip(order, batch, target.forward(batch), strict=True):
            made[name].append(logits)
            target.keep(rows.request_id, rows.context, kept)

    for name in names:
        assert target.open(f"of {name}", 128, Prefix(tokens=text, adapter=name))
    for start in range(0, 70, 35):
        chunk = tuple(text[start : start + 35])
        run(lambda owner: Rows(request_id=owner, context=start, tokens=chunk, logits=len(chunk)), list(range(35)))  # noqa: B023
    nodes, parents, path = tree_around(text, 71, source, target.vocab_size)
    tree, kept = (text[70], *nodes), [0, *(node + 1 for node in path)]
    run(lambda owner: Rows(request_id=owner, context=70, tokens=tree, parents=tuple(parents), logits=len(tree)), kept)
    run(lambda owner: Rows(request_id=owner, context=70 + len(kept), tokens=(9,), logits=1), [0])
    for name in names:
        target.close(f"of {name}")
    return {name: torch.cat(each) for name, each in made.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@contextmanager
def _not_adapted(rows: EmbeddedRows, tokens: torch.Tensor) -> Iterator[None]:
    """Without what an adapter adds to a module, which is added by a hook."""
    rows._embedded = rows._embeddings.forward(tokens)
    yield


@pytest.mark.parametrize("fault", [None, pytest.param(_not_adapted, marks=pytest.mark.exhaustive)])
def test_layers_that_read_embeddings_read_adapted_ones_in_every_stage(
    tmp_path: Path, make: Callable[..., TransformersTarget], fault: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hybrid("zamba", tmp_path / "zamba")
    adapter = make_adapter(tmp_path / "adapter", folder, targets=("embed_tokens", "q_proj", "linear"))
    named = {"lora_modules": {"one": str(adapter)}, "max_model_len": 256}
    wanted, split = passes(TransformersTarget(config(folder, 1, **named)), "", "one"), make(2, folder, **named)
    assert not torch.equal(*wanted.values())
    if fault is not None:
        monkeypatch.setattr(EmbeddedRows, "of", fault)
    found = passes(split, "", "one")
    assert torch.equal(found[""], wanted[""])
    assert torch.equal(found["one"], wanted["one"]) == (fault is None)


@pytest.mark.examples(2)
@pytest.mark.parametrize("stages", [2, pytest.param(LAYERS, marks=pytest.mark.exhaustive)])
def test_the_same_bits_as_in_one_process(
    make: Callable[..., TransformersTarget], folders: dict[str, str], whole: TransformersTarget, layers: str, stages: int
) -> None:
    wanted = passes(whole, *NAMES)
    assert len({tuple(each.argmax(-1).tolist()) for each in wanted.values()}) == len(NAMES)
    split = make(stages, lora_modules=folders)
    decoder = split._part.model.get_decoder()
    assert {isinstance(layer.forward, FusedLayer) for layer in decoder.layers} == {layers == "whole layers"}
    assert split.adapters == whole.adapters
    assert same(passes(split, *NAMES), wanted)
    for name in NAMES:
        assert torch.equal(passes(split, name)[name], wanted[name])


@pytest.mark.examples(2)
def test_what_may_be_adapted_is_known_of_all_layers(
    make: Callable[..., TransformersTarget], whole: TransformersTarget, folders: dict[str, str], parts: list[ModelSlice]
) -> None:
    split = make(3, lora_modules=folders)
    known = [split._part.adapters, *(part.adapters for part in parts)]
    assert len(known) == 3
    for adapters in known:
        assert adapters is not None and whole._part.adapters is not None
        assert list(adapters.layers.items()) == list(whole._part.adapters.layers.items())


@pytest.mark.examples(2)
def test_one_is_loaded_while_passes_run_and_another_takes_its_name(
    make: Callable[..., TransformersTarget], whole: TransformersTarget, folders: dict[str, str]
) -> None:
    wanted = passes(whole, *NAMES)
    split = make(2, lora_modules={"two": folders["two"]}, lora_folders=(Path(folders["one"]).parent,))
    loading = threading.Thread(target=split.load_adapter, args=("one", Path(folders["one"])))
    loading.start()
    before = passes(split, "", "two")
    while loading.is_alive():
        assert same(passes(split, "", "two"), before)
    split.load_adapter("late", Path(folders["late"]))
    assert same(passes(split, *NAMES), wanted) and same(before, {name: wanted[name] for name in ("", "two")})
    # The same one again changes nothing.
    assert split.load_adapter("one", Path(folders["one"])) == whole.adapters["one"]
    split.unload_adapter("one")
    split.load_adapter("one", Path(folders["late"]))
    assert torch.equal(passes(split, "", "one")["one"], wanted["late"])


def planted(fault: str) -> Callable[..., StoredAdapter]:
    """What stands for ``read_adapter`` in the stages, but not in the verifier."""

    def reading(folder: Path, *given: object) -> StoredAdapter:
        if threading.current_thread().name.startswith("adapter of stage 1") and fault == "memory":
            raise MemoryError("no room for 5 GiB")
        found = read_adapter(folder, *given)  # type: ignore[arg-type]
        return replace(found, digest="another") if fault == "another" else found

    return reading


@pytest.mark.examples(4)
@pytest.mark.parametrize(
    ("fault", "says"), [("memory", "stage 1: "), ("another", "another adapter"), ("elsewhere", "lora_folders")]
)
def test_where_one_stage_cannot_load_it_none_keeps_it(
    make: Callable[..., TransformersTarget], folders: dict[str, str], whole: TransformersTarget, parts: list[ModelSlice], monkeypatch: pytest.MonkeyPatch,
    fault: str, says: str,
) -> None:  # fmt: skip
    where = Path(folders["one"]).parent if fault != "elsewhere" else Path(folders["one"]).parents[1] / "nothing"
    split = make(3, lora_modules={"two": folders["two"]}, lora_folders=(where,))
    with monkeypatch.context() as patch:
        patch.setattr(split_adapters, "read_adapter", planted(fault))
        with refuses(ConfigurationError, says=says):
            split.load_adapter("one", Path(folders["one"]))
    assert split.adapters == {"two": whole.adapters["two"]}
    # What is to be dropped is told behind the question, so it is done by the time of the next answer.
    split.beat()
    split.beat()
    held = [part.adapters.digests.values() for part in parts if part.adapters is not None]
    assert len(held) == 2 and all(list(each) == [whole.adapters["two"]] for each in held)
    if fault != "elsewhere":
        split.load_adapter("one", Path(folders["one"]))
        assert same(passes(split, "one"), passes(whole, "one"))


def test_one_that_cannot_be_served_is_refused_as_in_one_process(
    make: Callable[..., TransformersTarget], whole: TransformersTarget, model: Path, tmp_path: Path
) -> None:
    """By what another stage's layers must fit; nobody is asked."""
    split = make(2, lora_folders=(tmp_path,))
    other = make_adapter(tmp_path / "other", model)
    tensors = load_file(other / WEIGHTS)
    save_file({name: each for name, each in tensors.items() if ".layers.0.mlp.up_proj." not in name}, other / WEIGHTS)
    said = []
    for target in (whole, split):
        with refuses(ConfigurationError, other, says="names model.layers.0.mlp.up_proj"):
            target.load_adapter("other", other)
    save_file({name: torch.cat([each, each], 1) for name, each in tensors.items()}, other / WEIGHTS)
    for target in (whole, split):
        with pytest.raises(ConfigurationError) as refused:
            target.load_adapter("other", other)
        said.append(str(refused.value))
    assert said[0] == said[1] and split.adapters == {}


def test_a_folder_of_the_settings_that_holds_none(make: Callable[..., TransformersTarget], tmp_path: Path) -> None:
    with refuses(ConfigurationError, CONFIG):
        make(2, lora_modules={"one": str(tmp_path)})


@pytest.mark.examples(2)
def test_a_target_that_is_rebuilt_has_its_adapters(
    make: Callable[..., TransformersTarget], whole: TransformersTarget, folders: dict[str, str], model: Path, tmp_path: Path,
    parts: list[ModelSlice], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """But for one that its new stages cannot read any more."""
    split = make(2, lora_modules={"two": folders["two"]}, lora_folders=(Path(folders["one"]).parent, tmp_path))
    split.load_adapter("one", Path(folders["one"]))
    split.load_adapter("late", make_adapter(tmp_path / "changed", model, seed=8))
    assert split.open("of two", 128, Prefix(tokens=(), adapter="two"))
    told = read_config(tmp_path / "changed")
    (tmp_path / "changed" / CONFIG).write_text(json.dumps({**told, "lora_alpha": 9}))
    split.recover()
    assert split.adapters == {name: whole.adapters[name] for name in ("two", "one")}
    assert "the adapter late is dropped" in caplog.text
    assert parts[-1].adapters is not None and len(parts[-1].adapters.digests) == 2
    assert same(passes(split, "", "one", "two"), passes(whole, "", "one", "two"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["phi3", "lfm2", "qwen3", "starcoder2"])
def test_models_of_other_types(make: Callable[..., TransformersTarget], kind: str, tmp_path: Path) -> None:
    """Joint projections; layers with a state; norms of queries and keys; biases."""
    folder = tmp_path / "model"
    folder.mkdir()
    assert architectures.make(kind, folder) is not None
    settings: dict[str, Any] = {"lora_folders": (tmp_path,), "kv_cache_tokens": 1024, "max_model_len": 128}
    alone, split = TransformersTarget(config(folder, 1, **settings)), make(2, folder, **settings)
    own, known = alone._part.adapters, split._part.adapters
    assert own is not None and known is not None and list(known.layers.items()) == list(own.layers.items())
    modules = [name for name, _ in AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_modules()]
    others = {name.rpartition(".")[2] for name in modules if name not in own.layers}
    targets = sorted({name.rpartition(".")[2] for name in own.layers} - others)
    where = make_adapter(tmp_path / "one", folder, seed=1, targets=targets, size=0.1)
    for target in (alone, split):
        target.load_adapter("one", where)
    wanted = passes(alone, "", "one")
    assert not torch.equal(wanted[""], wanted["one"])
    assert same(passes(split, "", "one"), wanted)
