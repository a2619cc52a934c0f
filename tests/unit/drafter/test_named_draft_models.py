"""Models that draft, as settings name them: by names of their own, for tenants, in the plan and in strategies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.models import drafters as draft_models
from cluster.models.drafters import bundled
from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import Settings, load
from services.api.messages import ClientRequest, RequestedSampling
from services.drafter.heads.eagle.source import FeatureSource, TreeForm
from services.drafter.heads.files.kinds import Checkpoint
from services.drafter.sources.catalogue import make_source
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig, served
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.sources import WHERE_TRAINED
from speculation.types import Plan
from tests.running.refusals import refuses
from tests.tiny_models import head_checkpoints as made
from tests.tiny_models.draft_folders import EAGLE3_LAYERS, found, make_folders, make_target, settings_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(target, tmp_path_factory.mktemp("models"))


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
    config = component_configs.drafter_config(settings, model)
    assert set(config.trained.at_start) == set(found)
    assert isinstance(make_source("eagle@code", config), FeatureSource)
    known = {each.name: each for each in component_configs.router_config(settings, model).strategy.trained}
    assert set(known) == {"eagle", "code", "small"}
    assert (known["code"].source, known["code"].tenants, known["code"].layers) == ("eagle@code", ("acme",), (-1,))


def test_a_pass_holds_the_streams_of_one_model(target: Path, folders: dict[str, Path]) -> None:
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
    assert not component_configs.drafter_config(settings, model).trained.asked_for
    assert component_configs.drafter_config(settings_of(target, folders["eagle"]), model).trained.asked_for


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
        make_source("eagle", component_configs.drafter_config(settings, ResolvedModel(name="tiny", path=target)))
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
    return component_configs.router_config(settings, ResolvedModel(name="tiny", path=target)).strategy


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
    assert str(refused_default.value) == "router.strategy is eagle3, which needs a checkpoint of eagle3: set drafter.models"
    assert strategies(target, folders["eagle3"], more=("router.strategy=eagle3",)).strategy == "eagle3"


def test_the_blend_takes_all_models_that_are_named(target: Path, folders: dict[str, Path]) -> None:
    def taken(*names: str) -> tuple[str, ...]:
        return plan_of(strategies(target, *(folders[name] for name in names)), "blend").sources[2:]

    assert plan_of(strategies(target), "blend").sources == ("suffix", "recycling")
    for name in folders:
        assert taken(name) == (name,)
    # At most eight.
    assert taken(*folders) == tuple(name for name in WHERE_TRAINED["blend"] if name in folders)[:8]
    assert taken("draft_model", "eagle3") == ("eagle3", "draft_model")
    assert plan_of(strategies(target, folders["eagle3"]), "blend").observe_layers == tuple(sorted(EAGLE3_LAYERS))
    assert plan_of(strategies(target, *folders.values()), "suffix").sources == ("suffix",)


def test_models_go_where_the_settings_say(target: Path, folders: dict[str, Path]) -> None:
    model = ResolvedModel(name="tiny", path=target)
    in_drafter = component_configs.drafter_config(settings_of(target, *folders.values()), model).trained
    assert in_drafter.checkpoints == folders and in_drafter.target == target
    elsewhere = settings_of(target, *folders.values(), more=("drafter.models_in=verifier",))
    assert component_configs.drafter_config(elsewhere, model).trained.checkpoints == {}
