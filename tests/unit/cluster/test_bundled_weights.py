"""The weights that come with Outrider: small, whole, recorded, installed with it, and taken for the default model by name."""

from __future__ import annotations

import asyncio
import json
import threading
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import drafters
from cluster.models import drafters as draft_models
from cluster.models.named_models import router_drafters
from cluster.models.target import BUILT_IN, ResolvedModel
from cluster.settings import component_configs
from cluster.settings.config import load
from services.api.messages import ClientRequest, RequestedSampling
from services.drafter import service
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.files.kinds import inspect
from services.drafter.service import DrafterService
from services.router.plans import make_plan
from services.router.strategies import StrategyConfig, served
from speculation.errors import ConfigurationError
from speculation.messages import OpenSession
from tests.drafters.model_source import ModelDouble
from tests.running.patience import PATIENCE_S
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model
from training.recipe import parse_recipe

_ALL = Path(drafters.__file__).parent
_FOLDERS = sorted(file.parent for file in _ALL.glob("*/*/config.json"))
_MOST_BYTES = 40 * 2**20
_ROOT = Path(__file__).parents[3]

_SHIPPED = ("draft_model", "eagle", "fspad", "medusa", "streaming")

every_folder = pytest.mark.parametrize("folder", _FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return record


def test_there_are_some_and_together_they_are_small() -> None:
    assert {_ALL / BUILT_IN / name for name in _SHIPPED} <= set(_FOLDERS)
    assert sum(file.stat().st_size for file in _ALL.rglob("*") if file.is_file()) <= _MOST_BYTES


def test_every_file_is_installed() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["drafters"]
    for folder in _FOLDERS:
        for file in folder.rglob("*"):
            if file.is_file():
                name = file.relative_to(_ALL)
                # Setuptools' * stands for no slash.
                assert any(
                    len(Path(pattern).parts) == len(name.parts) and fnmatch(str(name), pattern) for pattern in patterns
                ), f"{name} matches no pattern of package-data"


@every_folder
def test_its_headers_say_what_its_folder_says(folder: Path) -> None:
    found = inspect(folder, None)
    assert found.source == folder.name
    assert found.numbers > 0


@every_folder
def test_its_record_says_how_it_was_made(folder: Path) -> None:
    record = _record(folder)
    assert record["target"] == folder.parent.name
    assert all(len(record[name]) == 64 for name in ("target_weights_sha256", "tokenizer_sha256"))
    assert record["steps"] > 0 and record["predictions"] > 0
    assert record["data"]["domains"] and record["evaluation"]["domains"]["all"]["tree"]
    # The recipe is one of today's, so that the commands of the README make it again.
    parse_recipe(record["recipe"], str(folder))
    said = (folder / "README.md").read_text()
    assert "Apache-2.0" in said
    for command in ("data", "vocabulary", "run", "evaluate", "export"):
        assert f"outrider train {command}" in said


def test_the_default_model_has_the_strategies_out_of_the_box() -> None:
    settings = load(environ={})
    found = draft_models.draft_models(settings, ResolvedModel(name=settings.model, path=Path("/no/such/folder")))
    config = StrategyConfig(trained=router_drafters(settings, found))
    for name in _SHIPPED:
        assert name in found and name in served(config)
        request = ClientRequest(input="x", sampling=RequestedSampling(), strategy=name)
        assert make_plan(request, config).sources == (name,)


def test_a_default_server_loads_what_its_blend_uses() -> None:
    settings = load(environ={})
    model = ResolvedModel(name=settings.model, path=Path("/no/such/folder"))
    found = draft_models.draft_models(settings, model)
    trained = component_configs.drafter_config(settings, model).trained
    assert set(trained.checkpoints) == set(found)
    blend = make_plan(
        ClientRequest(input="x", sampling=RequestedSampling(), strategy="blend"),
        StrategyConfig(trained=router_drafters(settings, found)),
    )
    assert trained.at_start == ("fspad",) == tuple(name for name in blend.sources if name in found)
    assert draft_models.memory_here(settings, model) == found["fspad"].bytes_in("float32")
    # So is the model of the default strategy.
    default = load(flags=["router.strategy=medusa"], environ={})
    assert set(component_configs.drafter_config(default, model).trained.at_start) == {"fspad", "medusa"}
    # What somebody names, is wanted.
    folders = ", ".join(str(each.folder) for each in found.values())
    named = load(flags=[f"drafter.models=[{folders}]"], environ={})
    assert set(component_configs.drafter_config(named, model).trained.at_start) == set(found)
    assert draft_models.memory_here(named, model) == sum(each.bytes_in("float32") for each in found.values())


async def test_what_nobody_asks_for_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def make(name: str, config: DrafterConfig) -> ModelDouble:
        loaded.append(name)
        return ModelDouble()

    monkeypatch.setattr(service, "make_source", make)
    folders = {name: _ALL / BUILT_IN / name for name in _SHIPPED}
    drafter = DrafterService(replace(DrafterConfig(), trained=TrainedConfig(checkpoints=folders, asked_for=False)))
    await drafter.start()
    assert loaded == ["fspad"]
    await drafter.open(
        OpenSession(session_id="s", tokens=(1, 2), prompt_length=2, sources=("streaming",), max_nodes=4, tenant="")
    )
    await drafter._models["streaming"].load()
    assert loaded == ["fspad", "streaming"]
    await drafter.stop()


def test_another_target_of_that_name_is_told_apart(tmp_path: Path) -> None:
    with refuses(ConfigurationError, says="the head was trained for another"):
        inspect(_ALL / BUILT_IN / "fspad", make_tiny_model(tmp_path))
    # Nobody named the weights, so the model is served without them.
    assert not draft_models.draft_models(load(environ={}), ResolvedModel(name=BUILT_IN, path=tmp_path))
    named = load(flags=[f"drafter.models=[{_ALL / BUILT_IN / 'fspad'}]"], environ={})
    with refuses(ConfigurationError, says="tokenizer_sha256 in training.json"):
        draft_models.draft_models(named, ResolvedModel(name=BUILT_IN, path=tmp_path))


async def test_a_model_at_work_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while a thread of its own loads weights would be aborted."""
    begun, go_on, loaded = threading.Event(), threading.Event(), []

    def make(name: str, config: DrafterConfig) -> ModelDouble:
        begun.set()
        go_on.wait(PATIENCE_S)
        loaded.append(name)
        return ModelDouble()

    monkeypatch.setattr(service, "make_source", make)
    drafter = DrafterService(replace(DrafterConfig(), trained=TrainedConfig(checkpoints={}, asked_for=False)))
    await drafter.open(OpenSession(session_id="s", tokens=(1, 2), prompt_length=2, sources=("medusa",), max_nodes=4))
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    stopping = asyncio.create_task(drafter.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    go_on.set()
    await stopping
    assert loaded == ["medusa"]
