"""One table of sources, and settings that are written once: every entry can be made, every setting arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from cluster.models.drafters import by_kernels, linear_kernels
from cluster.models.target import ResolvedModel
from cluster.settings import component_configs
from cluster.settings.components import DrafterSettings
from cluster.settings.config import load
from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.sources.catalogue import check_names, make_source
from services.settings import Setting, filled, settings_of
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import OpenSession
from speculation.sources import SOURCES, STRATEGIES, STRATEGY_NODES, WHERE_INDEXED, WHERE_PREDICTED
from tests.running.refusals import refuses
from tests.tiny_models.draft_models import draft_beside
from tests.tiny_models.trained_heads import heads_beside

MODEL = ResolvedModel(name="a model", path=Path("a model"))


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_can_be_made(tiny_model: Path, name: str) -> None:
    assert SOURCES[name].name == name
    trained = TrainedConfig(
        checkpoints={"draft_model": draft_beside(tiny_model), **heads_beside(tiny_model)}, target=tiny_model
    )
    if SOURCES[name].kind == "model":
        with refuses(ConfigurationError, "drafter.models", f"no weights of {name}"):
            make_source(name, DrafterConfig())
        with refuses(ConfigurationError, field="trained.target", value="null"):
            make_source(name, DrafterConfig(trained=replace(trained, target=None)))
    source = make_source(name, DrafterConfig(trained=trained))
    session = source.open(OpenSession(session_id="s", tokens=(1, 2, 1), prompt_length=3, sources=(name,), max_nodes=4))
    # What its entry says of it is what it does.
    assert hasattr(session, "query") == SOURCES[name].retrieval
    session.close()
    source.forget("nobody")


def test_strategies_name_what_there_is() -> None:
    for sources in (*STRATEGIES.values(), *WHERE_INDEXED.values(), WHERE_PREDICTED.values()):
        check_names(sources, DrafterConfig())
    assert STRATEGY_NODES.keys() | WHERE_INDEXED.keys() | WHERE_PREDICTED.keys() <= STRATEGIES.keys()


def test_unknown_sources_are_refused_with_the_known_ones() -> None:
    with refuses(InvalidArgument, field="sources", value="head", allowed="one of anpd, autoregressive"):
        check_names(("suffix", "head"), DrafterConfig())


_SHARED = Setting("how many", name="size", ge=1)


@dataclass(frozen=True, kw_only=True)
class _Inner:
    size: Annotated[int, _SHARED] = 2
    internal: int = 9


@dataclass(frozen=True, kw_only=True)
class _Outer:
    first: _Inner = field(default_factory=_Inner)
    size: Annotated[int, _SHARED] = 2
    name: Annotated[str | None, Setting("its name", name="called")] = None
    words: Annotated[Mapping[str, int], Setting("under the field's own name")] = field(default_factory=dict)


def test_a_setting_is_written_once() -> None:
    assert [(mark.name, kind, default) for mark, kind, default in settings_of(_Outer)] == [
        ("size", int, 2),
        ("size", int, 2),
        ("called", str | None, None),
        ("words", Mapping[str, int], {}),
    ]
    section = SimpleNamespace(size=5, called="x", words={"a": 1})
    assert filled(_Outer, section) == _Outer(first=_Inner(size=5), size=5, name="x", words={"a": 1})
    inner = _Inner(size=5, internal=1)
    assert filled(_Outer, section, first=inner) == _Outer(first=inner, size=5, name="x", words={"a": 1})


def test_every_setting_of_the_drafter_arrives() -> None:
    marks = {mark.name: (kind, default) for mark, kind, default in settings_of(DrafterConfig)}
    assert marks.keys() <= DrafterSettings.model_fields.keys()
    other: dict[object, Callable[[Any], object]] = {
        int: lambda value: value + 1,
        float: lambda value: value / 2,
        bool: lambda value: not value,
        str: lambda value: f"{value}:1",
        int | None: lambda value: 3,
    }
    # Refused without the weights that they are for; tests/unit/drafter/test_draft_models.py and test_uno.py set them beside these.
    del marks["speculative_num_draft_tokens"], marks["uno_branches"]
    flags = [f"drafter.{name}={other[kind](default)}" for name, (kind, default) in marks.items() if kind in other]
    config = component_configs.drafter_config(load(None, [*flags, "drafter.keep_calibration=false"], {}), MODEL)

    def compare(given: object, plain: object) -> int:
        changed = 0
        for each in fields(given):  # type: ignore[arg-type]
            one, two = getattr(given, each.name), getattr(plain, each.name)
            changed += compare(one, two) if hasattr(one, "__dataclass_fields__") else one != two
        return changed

    # Three settings are Lookahead's as well as SPECTRA's. What models draft for is the model, by its kernels, and nobody named any.
    ours = TrainedConfig(asked_for=False, target=MODEL.path, draft_kernels=by_kernels, linear_kernels=linear_kernels)
    plain = replace(DrafterConfig(), trained=ours)
    assert compare(config, plain) == len(flags) + 3
