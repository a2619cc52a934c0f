"""Models that draft, by their folders: recognised and counted; what cannot draft is refused by its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.checks import preflight
from cluster.models.drafters import memory_here
from cluster.models.target import ResolvedModel
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.files.kinds import inspect
from services.drafter.sources.catalogue import make_source
from services.model_files.weights.files import save_blocks
from services.model_files.weights.stored_blocks import quantized
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.tiny_models import head_checkpoints as made
from tests.tiny_models.draft_folders import EAGLE3_LAYERS, count, found, make_folders, make_target, settings_of
from tests.tiny_models.head_checkpoints import HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint, numbers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(target, tmp_path_factory.mktemp("models"))


def refused(target: Path | None, folder: Path) -> str:
    """What is said of a folder, which must name it."""
    with pytest.raises(ConfigurationError) as caught:
        inspect(folder, target)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_each_kind_is_recognised(target: Path, folders: dict[str, Path]) -> None:
    assert {name: each.layers for name, each in found(target, *folders.values()).items()} == {
        "eagle": (-1,),
        "eagle3": EAGLE3_LAYERS,
        "fspad": (-1,),
        "streaming": (LAYERS - 2,),
        "medusa": (-1,),
        "peagle": EAGLE3_LAYERS,
        "dflash": (0, -1),
        "uno": (),
        "draft_model": (),
    }
    for name, folder in folders.items():
        assert inspect(folder, target).source == name
        # Its tensors say so before the target is there, but nothing of layers.
        early = inspect(folder, None)
        assert (early.source, early.layers) == (name, ())


@pytest.mark.parametrize(
    ("head", "source"),
    [
        (made.hass(), "eagle"),
        (made.fspad(sampler=False), "fspad"),
        (made.fspad(two_outputs=False), "fspad"),
        (made.speculators_eagle(), "eagle"),
        (made.speculators_eagle3(), "eagle3"),
    ],
    ids=["hass", "alignment", "sampler", "speculators eagle", "speculators eagle3"],
)
def test_what_is_recognised_is_what_loads(tmp_path: Path, target: Path, head: HeadCheckpoint, source: str) -> None:
    head.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder = head.write(tmp_path)
    known = inspect(folder, target)
    assert known.source == source
    make_source(source, DrafterConfig(trained=TrainedConfig(checkpoints={source: folder}, target=target)))


def test_language_models_by_any_names_of_layers(tmp_path: Path, target: Path) -> None:
    for name in ("model.layers.0.mlp.up_proj.weight", "transformer.h.0.mlp.c_fc.weight", "gpt_neox.layers.0.mlp.weight"):
        folder = HeadCheckpoint({"model_type": "x"}, {name: numbers(4, 4)}).write(tmp_path / name)
        assert inspect(folder, target).source == "draft_model"


def test_weights_in_blocks_are_counted_as_numbers(tmp_path: Path, target: Path, folders: dict[str, Path]) -> None:
    head = made.eagle()
    folder = head.write(tmp_path)
    (folder / "model.safetensors").unlink()
    save_blocks({name: each if each.dim() == 1 else quantized(each) for name, each in head.tensors.items()}, folder)
    known, plain = inspect(folder, target), inspect(folders["eagle"], target)
    assert (known.source, known.layers, known.numbers) == (plain.source, plain.layers, plain.numbers)
    make_source("eagle", DrafterConfig(trained=TrainedConfig(checkpoints={"eagle": folder}, target=target)))


def test_memory_is_counted(target: Path, folders: dict[str, Path]) -> None:
    known = found(target, *folders.values())
    assert known["draft_model"].numbers == count(folders["draft_model"])
    # Its output rows are its own.
    assert known["eagle3"].numbers == count(folders["eagle3"])
    # The target's rows are kept beside it, in the type that it computes in.
    assert known["fspad"].numbers == count(folders["fspad"]) + VOCABULARY * HIDDEN
    assert known["medusa"].numbers == count(folders["medusa"]) + VOCABULARY * HIDDEN
    assert known["dflash"].numbers == count(folders["dflash"]) + VOCABULARY * HIDDEN
    assert known["uno"].numbers == count(folders["uno"], "adapter_model.safetensors")
    # And the layers that streams run through.
    own = {name: each for name, each in load_file(target / "model.safetensors").items() if f"layers.{LAYERS - 1}." in name}
    layer = sum(each.numel() for each in own.values()) + HIDDEN
    assert known["streaming"].numbers == count(folders["streaming"]) + layer + VOCABULARY * HIDDEN
    every = sum(each.numbers for each in known.values())
    model = ResolvedModel(name="tiny", path=target)
    assert memory_here(settings_of(target, *folders.values()), model) == 4 * every
    half = settings_of(target, *folders.values(), more=("drafter.dtype=bfloat16",))
    # The target holds it, in float32, wherever the others are.
    assert memory_here(half, model) == 2 * every + 2 * known["uno"].numbers
    elsewhere = settings_of(target, *folders.values(), more=("drafter.device=cuda",))
    assert memory_here(elsewhere, model) == 4 * known["uno"].numbers


def test_too_little_memory_for_both(target: Path, folders: dict[str, Path]) -> None:
    pool = "verifier.kv_cache_tokens=512"
    both = settings_of(target, folders["draft_model"], more=(pool,))
    taken = memory_here(both, ResolvedModel(name="tiny", path=target))
    # Keys and values of two heads of 16 numbers in every layer.
    needed = 4 * count(target) + 512 * LAYERS * 2 * 2 * 16 * 4
    assert preflight.preflight(both, memory=lambda: float(needed + taken)) == ()
    less = lambda: float(needed + taken - 1)  # noqa: E731
    with refuses(ConfigurationError, field="model"):
        preflight.preflight(both, memory=less)
    assert preflight.preflight(settings_of(target, more=(pool,)), memory=less) == ()


def test_what_cannot_draft(tmp_path: Path, target: Path, folders: dict[str, Path]) -> None:
    assert refused(target, tmp_path / "none") == f"drafter.models names {tmp_path / 'none'}: no such folder"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json cannot be read" in refused(target, empty)
    (empty / "config.json").write_text("{}")
    assert "no model.safetensors there" in refused(target, empty)
    (empty / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is pickled" in refused(target, empty)
    assert "outrider train convert" in refused(target, empty)
    other = HeadCheckpoint({**made.eagle().config, "hidden_size": 32}, made.eagle().tensors).write(tmp_path / "hidden")
    assert "hidden_size is 32: must be 64, the target's: it is another target's head" in refused(target, other)
    # That is found as soon as the target is there.
    assert inspect(other, None).source == "eagle"
    vocabulary = made.eagle(vocab_size=1000).write(tmp_path / "vocabulary")
    assert "vocab_size is 1000: must be 320, the target's" in refused(target, vocabulary)
    lossy = made.eagle(accept_lenience=0.5).write(tmp_path / "lossy")
    assert "accept_lenience is 0.5: must be 1: anything else changes the target's answers" in refused(target, lossy)
    whole = (folders["eagle"] / "model.safetensors").read_bytes()
    cut = Path(shutil.copytree(folders["eagle"], tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes(whole[:-5])
    assert "it is cut off" in refused(target, cut)
    blocks = Path(shutil.copytree(folders["eagle"], tmp_path / "blocks"))
    (blocks / "model.safetensors").rename(blocks / "blocks.safetensors")
    assert "does not say of which types its blocks are" in refused(target, blocks)


@pytest.mark.parametrize(
    ("kind", "config", "tensors"),
    [
        ("DFlash", {"dflash_config": {"mask_token_id": 3}}, ("fc.weight", "layers.0.mlp.up_proj.weight")),
        # A language model by its tensors alone.
        ("DFlash", {"speculators_model_type": "dflash"}, ("layers.0.mlp.up_proj.weight",)),
        ("PARD-2", {"pard_token": 5, "pard2": True}, ("model.layers.0.mlp.up_proj.weight",)),
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["with its target", "without"])
def test_other_kinds_are_refused_by_name(
    tmp_path: Path, target: Path, kind: str, config: dict[str, object], tensors: tuple[str, ...], there: bool
) -> None:
    folder = HeadCheckpoint(config, {name: numbers(8, 8) for name in tensors}).write(tmp_path)
    said = refused(target if there else None, folder)
    why = "its tensors must be named as" if kind == "DFlash" else "drafters of this kind are not supported yet"
    assert f"is a {kind} checkpoint: {why}" in said


def test_medusa_by_unknown_names_is_refused(tmp_path: Path, target: Path) -> None:
    config = {"architectures": ["MedusaModel"]}
    folder = HeadCheckpoint(config, {"blocks.0.weight": numbers(8, 8), "lm_heads.0.weight": numbers(8, 8)}).write(tmp_path)
    assert "is a Medusa checkpoint: its tensors must be named as its authors" in refused(target, folder)


def test_the_device_of_draft_models(target: Path) -> None:
    with refuses(ConfigurationError, field="drafter.device", value="tpu", allowed="cpu, cuda or cuda:NUMBER"):
        preflight.preflight(settings_of(target, more=("drafter.device=tpu",)))


def test_another_targets_head_is_found_once_the_target_is(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    checkpoint = made.eagle(vocab_size=1000).write(tmp_path / "head")
    settings = settings_of(target, checkpoint, more=("model=some/model",))
    # On a Ray elsewhere, whose memory is not looked at.
    assert preflight.preflight(settings, here=False) != ()
    kept = tmp_path / "hub" / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(target, kept / "snapshots" / "abc")
    with refuses(
        ConfigurationError, field="vocab_size", value=1000, allowed="320, the target's: it is another target's head"
    ):
        preflight.preflight(settings, here=False)


def test_a_head_under_another_name(target: Path, folders: dict[str, Path]) -> None:
    wrong = TrainedConfig(checkpoints={"eagle": folders["fspad"]}, target=target)
    with refuses(ConfigurationError, field="fspad"):
        make_source("eagle", DrafterConfig(trained=wrong))
