"""Models that draft, as settings name them: recognised, counted, shown and offered; what cannot draft is refused by its folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster import build
from cluster.checks import preflight
from cluster.models import drafters as draft_models
from cluster.models.drafters import bundled, memory_here
from cluster.models.target import ResolvedModel
from cluster.settings.config import Settings, load
from services.api.messages import ClientRequest, RequestedSampling
from services.drafter.catalogue import make_source
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.files.kinds import Checkpoint, inspect
from services.model_files.weights.files import save_blocks
from services.model_files.weights.stored_blocks import quantized
from services.router.strategies import StrategyConfig, make_plan, served
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.sources import WHERE_TRAINED
from speculation.types import Plan
from tests import head_checkpoints as made
from tests.head_checkpoints import HIDDEN, LAYERS, VOCABULARY, HeadCheckpoint, numbers
from tests.refusals import refuses
from tests.tiny import make_tiny_model
from tests.trained_heads import make_blocks, make_medusa, make_streams

ROOT = Path(__file__).parents[2]
EAGLE3_LAYERS = (1, LAYERS // 2 - 1, LAYERS - 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, by source."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("models")
    heads = {"eagle": made.eagle(), "eagle3": made.eagle3(), "fspad": made.fspad()}
    written = {name: each.write(folder / name) for name, each in heads.items()}
    written["streaming"] = make_streams(target, folder / "streaming")
    written["medusa"] = make_medusa(target, folder / "medusa")
    written["peagle"] = made.peagle().write(folder / "peagle")
    written["dflash"] = make_blocks(target, folder / "dflash")
    return {**written, "draft_model": make_tiny_model(folder / "draft_model", num_hidden_layers=1)}


def count(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def settings_of(target: Path, *folders: Path, more: tuple[str, ...] = ()) -> Settings:
    named = f"drafter.models=[{', '.join(map(str, folders))}]"
    cache = f"cache_dir={target.parent / 'cache'}"
    return load(flags=[f"model={target}", "server.port=0", cache, named, *more], environ={})


def found(target: Path, *folders: Path) -> dict[str, Checkpoint]:
    settings = settings_of(target, *folders)
    return dict(draft_models.draft_models(settings, ResolvedModel(name="tiny", path=target)))


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
    # And the layers that streams run through.
    own = {name: each for name, each in load_file(target / "model.safetensors").items() if f"layers.{LAYERS - 1}." in name}
    layer = sum(each.numel() for each in own.values()) + HIDDEN
    assert known["streaming"].numbers == count(folders["streaming"]) + layer + VOCABULARY * HIDDEN
    every = sum(each.numbers for each in known.values())
    model = ResolvedModel(name="tiny", path=target)
    assert memory_here(settings_of(target, *folders.values()), model) == 4 * every
    half = settings_of(target, *folders.values(), more=("drafter.dtype=bfloat16",))
    assert memory_here(half, model) == 2 * every
    elsewhere = settings_of(target, *folders.values(), more=("drafter.device=cuda",))
    assert memory_here(elsewhere, model) == 0


def test_too_little_memory_for_both(target: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pool = "verifier.kv_cache_tokens=512"
    both = settings_of(target, folders["draft_model"], more=(pool,))
    taken = memory_here(both, ResolvedModel(name="tiny", path=target))
    # Keys and values of two heads of 16 numbers in every layer.
    needed = 4 * count(target) + 512 * LAYERS * 2 * 2 * 16 * 4
    monkeypatch.setattr(preflight, "free_memory", lambda: float(needed + taken))
    assert preflight.preflight(both) == ()
    monkeypatch.setattr(preflight, "free_memory", lambda: float(needed + taken - 1))
    with refuses(ConfigurationError, field="model"):
        preflight.preflight(both)
    assert preflight.preflight(settings_of(target, more=(pool,))) == ()


def test_two_of_one_kind_with_names(tmp_path: Path, target: Path, folders: dict[str, Path]) -> None:
    entries = [
        str(folders["eagle"]),
        {"folder": str(shutil.copytree(folders["eagle"], tmp_path / "other")), "name": "code", "tenants": ["acme"]},
        {"folder": str(folders["draft_model"]), "name": "small"},
    ]
    model = ResolvedModel(name="tiny", path=target)
    settings = load(flags=[f"model={target}", f"drafter.models={json.dumps(entries)}"], environ={})
    found = draft_models.draft_models(settings, model)
    assert {source: each.folder for source, each in found.items()} == {
        "eagle": folders["eagle"],
        "eagle@code": tmp_path / "other",
        "draft_model@small": folders["draft_model"],
    }
    config = build.drafter_config(settings, model)
    assert set(config.trained.at_start) == set(found)
    assert isinstance(make_source("eagle@code", config), FeatureSource)
    known = {each.name: each for each in build.router_config(settings, model).strategy.trained}
    assert set(known) == {"eagle", "code", "small"}
    assert (known["code"].source, known["code"].tenants, known["code"].layers) == ("eagle@code", ("acme",), (-1,))


def test_a_pass_holds_the_streams_of_one_model(target: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    entries: list[dict[str, str]] = [{"folder": str(folders["streaming"]), "name": "mine"}]
    model = ResolvedModel(name="tiny", path=target)

    def found(*named: dict[str, str]) -> dict[str, Checkpoint]:
        flags = [f"model={target}", f"drafter.models={json.dumps(named)}", "drafter.streaming_form=one_pass"]
        return dict(draft_models.draft_models(load(flags=flags, environ={}), model))

    (source, streams), *_ = found(*entries).items()
    assert source == "streaming@mine" and streams.layers == streams.layers_in_pass
    with refuses(ConfigurationError, field="drafter.streaming_form", value="one_pass"):
        found(*entries, {"folder": str(folders["streaming"]), "name": "other"})


def test_two_of_one_source(tmp_path: Path, target: Path, folders: dict[str, Path]) -> None:
    other = Path(shutil.copytree(folders["eagle"], tmp_path / "other"))
    with pytest.raises(ConfigurationError) as caught:
        found(target, folders["eagle"], other)
    assert (
        str(caught.value)
        == f"drafter.models names {folders['eagle']} and {other}: both are weights of eagle; give one of them a name"
    )


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


def test_weights_that_come_with_outrider(
    tmp_path: Path, target: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_models, "_BUNDLED", tmp_path)
    for name in ("fspad", "draft_model"):
        shutil.copytree(folders[name], tmp_path / "a-model" / name)
    (tmp_path / "a-model" / "notes").mkdir()
    expected = [tmp_path / "a-model" / "draft_model", tmp_path / "a-model" / "fspad"]
    assert bundled("A-Model") == bundled("someone/a-model") == bundled("/models/a-model/") == expected
    assert bundled("another") == bundled("") == bundled("..") == []
    settings = load(flags=[f"model={target}"], environ={})

    def drafting(settings: Settings, name: str) -> list[str]:
        return list(draft_models.draft_models(settings, ResolvedModel(name=name, path=target)))

    assert drafting(settings, "a-model") == ["draft_model", "fspad"]
    assert drafting(settings, "another") == []
    # Weights for another tokenizer are left out, unless they are named.
    fspad = tmp_path / "a-model" / "fspad"
    (fspad / "training.json").write_text(json.dumps({"tokenizer_sha256": "f" * 64}))
    assert drafting(settings, "a-model") == ["draft_model"]
    with refuses(ConfigurationError, field="a-model/fspad"):
        drafting(settings_of(target, fspad), "a-model")
    # Named ones take their place; [] is none.
    assert drafting(settings_of(target), "a-model") == []
    assert drafting(settings_of(target, folders["eagle"]), "a-model") == ["eagle"]
    model = ResolvedModel(name="a-model", path=target)
    assert not build.drafter_config(settings, model).trained.asked_for
    assert build.drafter_config(settings_of(target, folders["eagle"]), model).trained.asked_for


def test_eagles_own_tree_can_be_set(target: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[TreeForm] = []
    monkeypatch.setattr(FeatureSource, "__init__", lambda self, *rest, form, **more: forms.append(form))
    for own in (
        [],
        ["drafter.speculative_num_draft_tokens=60", "drafter.speculative_eagle_topk=10"],
        # The first pass gives the first level.
        ["drafter.speculative_num_steps=1"],
    ):
        settings = load(flags=[f"model={target}", f"drafter.models=[{folders['eagle']}]", *own], environ={})
        make_source("eagle", build.drafter_config(settings, ResolvedModel(name="tiny", path=target)))
    assert forms == [TreeForm(), TreeForm(width=10, dynamic=60), TreeForm(steps=0)]


def test_the_plan_shows_them(target: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """As a user runs it; without torch."""

    def plan(*more: str) -> str:
        flags = [f"drafter.models=[{', '.join(map(str, folders.values()))}]", *more]
        arguments = ["outrider", "plan", *(part for flag in flags for part in ("--set", flag))]
        script = (
            f"import sys; sys.argv = {arguments!r}\nfrom cli.main import main\n"
            "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
            "print('heavy:', [name for name in ('torch', 'numpy') if name in sys.modules])"
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OUTRIDER_"))}
        environment |= {"OUTRIDER_MODEL": str(target), "OUTRIDER_CACHE_DIR": str(tmp_path), "OUTRIDER_SERVER__PORT": "0"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment | {"COLUMNS": "400"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = plan().splitlines()
    assert told[-1] == "heavy: []"
    known = found(target, *folders.values())
    size = {name: f"{each.bytes_in('float32') / 2**20:,.0f}" for name, each in known.items()}
    on = "MiB in float32 on cpu, in the drafter's processes"
    states = "reads the target's states of layers"
    assert f"draft_model: {folders['draft_model']}, {size['draft_model']} {on}" in told
    assert f"fspad: {folders['fspad']}, {size['fspad']} {on}, {states} -1 (128 bytes a token)" in told
    assert f"eagle3: {folders['eagle3']}, {size['eagle3']} {on}, {states} 1, 3, 4 (384 bytes a token)" in told
    assert f"dflash: {folders['dflash']}, {size['dflash']} {on}, {states} 0, -1 (256 bytes a token)" in told
    told = plan("drafter.models_in=verifier", "drafter.dtype=bfloat16").splitlines()
    half = f"{known['eagle'].bytes_in('bfloat16') / 2**20:,.0f} MiB in bfloat16 on cpu, in the verifier's processes"
    assert f"eagle: {folders['eagle']}, {half}, {states} -1 (128 bytes a token)" in told


def plan_of(config: StrategyConfig, strategy: str) -> Plan:
    return make_plan(ClientRequest(input="x", sampling=RequestedSampling(), strategy=strategy), config)


def strategies(target: Path, *folders: Path, more: tuple[str, ...] = ()) -> StrategyConfig:
    settings = settings_of(target, *folders, more=more)
    return build.router_config(settings, ResolvedModel(name="tiny", path=target)).strategy


def test_the_layers_that_a_model_reads_reach_the_plan(tmp_path: Path, target: Path, folders: dict[str, Path]) -> None:
    every = strategies(target, *folders.values())
    plan = plan_of(every, "eagle3")
    assert plan.observe_layers == tuple(sorted(EAGLE3_LAYERS)) and plan.observe_prompt
    assert plan_of(every, "fspad").observe_layers == (-1,)
    own = plan_of(every, "draft_model")
    assert own.observe_layers == () and not own.observe_prompt
    # Those that its weights name, not those of its kind.
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    other = made.eagle3(**ids).write(tmp_path)
    assert plan_of(strategies(target, other), "eagle3").observe_layers == (1, 3, 5)


def test_strategies_without_their_model(target: Path, folders: dict[str, Path]) -> None:
    config = strategies(target, folders["draft_model"])
    assert "draft_model" in served(config) and not {"eagle", "eagle3", "fspad"} & set(served(config))
    with pytest.raises(InvalidArgument) as caught:
        plan_of(config, "fspad")
    usable = ", ".join(sorted(served(config)))
    assert str(caught.value).endswith(f"is fspad: must be one of {usable}; this server has no checkpoint of fspad")
    with pytest.raises(ConfigurationError) as refused_default:
        strategies(target, folders["draft_model"], more=("router.strategy=eagle3",))
    assert str(refused_default.value) == "strategy is eagle3, which needs a checkpoint of eagle3: set drafter.models"
    assert strategies(target, folders["eagle3"], more=("router.strategy=eagle3",)).strategy == "eagle3"


def test_the_blend_takes_all_models_that_are_named(target: Path, folders: dict[str, Path]) -> None:
    def taken(*names: str) -> tuple[str, ...]:
        return plan_of(strategies(target, *(folders[name] for name in names)), "blend").sources[2:]

    assert plan_of(strategies(target), "blend").sources == ("suffix", "recycling")
    for name in folders:
        assert taken(name) == (name,)
    assert taken(*folders) == tuple(name for name in WHERE_TRAINED["blend"] if name in folders)
    assert taken("draft_model", "eagle3") == ("eagle3", "draft_model")
    assert plan_of(strategies(target, folders["eagle3"]), "blend").observe_layers == tuple(sorted(EAGLE3_LAYERS))
    assert plan_of(strategies(target, *folders.values()), "suffix").sources == ("suffix",)


def test_the_device_of_draft_models(target: Path) -> None:
    with refuses(ConfigurationError, field="drafter.device", value="tpu", allowed="cpu, cuda or cuda:NUMBER"):
        preflight.preflight(settings_of(target, more=("drafter.device=tpu",)))


def test_another_targets_head_is_found_once_the_target_is(
    tmp_path: Path, target: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
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


def test_models_go_where_the_settings_say(target: Path, folders: dict[str, Path]) -> None:
    model = ResolvedModel(name="tiny", path=target)
    in_drafter = build.drafter_config(settings_of(target, *folders.values()), model).trained
    assert in_drafter.checkpoints == folders and in_drafter.target == target
    elsewhere = settings_of(target, *folders.values(), more=("drafter.models_in=verifier",))
    assert build.drafter_config(elsewhere, model).trained.checkpoints == {}


def test_a_head_under_another_name(target: Path, folders: dict[str, Path]) -> None:
    wrong = TrainedConfig(checkpoints={"eagle": folders["fspad"]}, target=target)
    with refuses(ConfigurationError, field="fspad"):
        make_source("eagle", DrafterConfig(trained=wrong))
