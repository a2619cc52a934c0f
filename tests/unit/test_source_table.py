"""One table of sources, and settings that are written once: every entry can be made, every setting arrives."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated

import pytest

from cluster import build
from cluster.config import DrafterSettings, load
from services.drafter.catalogue import check_names, make_source
from services.drafter.config import DrafterConfig
from services.settings import Setting, filled, settings_of
from speculation.errors import InvalidArgument
from speculation.messages import OpenSession
from speculation.sources import SOURCES, STRATEGIES, STRATEGY_NODES, WHERE_INDEXED, SourceSpec


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_can_be_made(name: str) -> None:
    assert SOURCES[name].name == name
    source = make_source(name, DrafterConfig())
    session = source.open(OpenSession(session_id="s", tokens=(1, 2, 1), prompt_length=3, sources=(name,), max_nodes=4))
    # What its entry says of it is what it does.
    assert hasattr(session, "query") == SOURCES[name].retrieval
    session.close()
    source.forget("nobody")


def test_strategies_name_what_there_is() -> None:
    for sources in (*STRATEGIES.values(), *WHERE_INDEXED.values()):
        check_names(sources)
    assert STRATEGY_NODES.keys() | WHERE_INDEXED.keys() <= STRATEGIES.keys()


def test_heads_are_no_drafters_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "head", SourceSpec(name="head", kind="head", made_by="nowhere:at_all"))
    with pytest.raises(InvalidArgument, match=r"sources.*anpd, autoregressive") as caught:
        check_names(("suffix", "head"))
    assert "head" not in str(caught.value).partition("one of ")[2].split(", ")


_SHARED = Setting(name="size", ge=1)


@dataclass(frozen=True, kw_only=True)
class _Inner:
    size: Annotated[int, _SHARED] = 2
    internal: int = 9


@dataclass(frozen=True, kw_only=True)
class _Outer:
    first: _Inner = field(default_factory=_Inner)
    size: Annotated[int, _SHARED] = 2
    name: Annotated[str | None, Setting(name="called", about="its name")] = None


def test_a_setting_is_written_once() -> None:
    assert [(mark.name, kind, default) for mark, kind, default in settings_of(_Outer)] == [
        ("size", int, 2),
        ("size", int, 2),
        ("called", str | None, None),
    ]
    assert filled(_Outer, {"size": 5, "called": "x"}.__getitem__) == _Outer(first=_Inner(size=5), size=5, name="x")


def test_every_setting_of_the_drafter_arrives() -> None:
    marks = {mark.name: (kind, default) for mark, kind, default in settings_of(DrafterConfig)}
    assert marks.keys() <= DrafterSettings.model_fields.keys()
    other = {int: lambda value: value + 1, float: lambda value: value / 2, bool: lambda value: not value}
    flags = [f"drafter.{name}={other[kind](default)}" for name, (kind, default) in marks.items() if kind in other]
    config = build.drafter_config(load(None, [*flags, "drafter.keep_calibration=false"], {}))
    told = {mark.name: default for mark, _, default in settings_of(DrafterConfig)}

    def compare(given: object, plain: object) -> int:
        changed = 0
        for each in fields(given):  # type: ignore[arg-type]
            one, two = getattr(given, each.name), getattr(plain, each.name)
            changed += compare(one, two) if hasattr(one, "__dataclass_fields__") else one != two
        return changed

    # Three settings are Lookahead's as well as SPECTRA's; the snapshot is a file.
    assert compare(config, DrafterConfig()) == len(told) - 1 + 3
