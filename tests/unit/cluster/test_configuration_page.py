"""Settings are declared once: docs/configuration.md follows from the declarations, and every value arrives where it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.models.target import ResolvedModel
from cluster.settings import component_configs, reference
from cluster.settings.components import DrafterSettings, RetrievalSettings, RouterSettings, VerifierSettings
from cluster.settings.config import Settings, load
from cluster.settings.server import ServerSettings
from cluster.settings.unknown import section_in
from services.api.config import HttpConfig
from services.drafter.config import DrafterConfig
from services.machine.processor import cache_folder
from services.retrieval.config import RetrievalConfig
from services.router.config import RouterConfig
from services.settings import filled, settings_of
from services.verifier.config import TargetConfig, VerifierConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text()


def settings_below(section: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its path, also of sections that may be absent."""
    for name, field in section.model_fields.items():
        below = section_in(field.annotation)
        if below is not field.annotation:
            yield f"{prefix}{name}", field
        if below is not None:
            yield from settings_below(below, f"{prefix}{name}.")


def test_the_page_is_fresh() -> None:
    assert reference.page() == PAGE, "write it with: python -m cluster.settings.reference > docs/configuration.md"
    assert str(cache_folder()) not in PAGE


def test_every_setting_has_a_meaning_and_a_line() -> None:
    declared = dict(settings_below())
    assert len(declared) >= 150
    assert [path for path, field in declared.items() if not field.description] == []
    rows = dict(re.findall(r"^\| `([\w.*]+)` \|.*\| (.+) \|$", PAGE, re.MULTILINE))
    shared = {re.sub(r"^\w+\.autoscaling\.", "*.autoscaling.", path): field for path, field in declared.items()}
    assert rows == {path: field.description for path, field in shared.items()}


MARKED = [
    (VerifierConfig, VerifierSettings),
    (DrafterConfig, DrafterSettings),
    (RetrievalConfig, RetrievalSettings),
    (RouterConfig, RouterSettings),
    (HttpConfig, ServerSettings),
]


@pytest.mark.parametrize(("config", "section"), MARKED)
def test_every_marked_setting_arrives(config: type, section: type[BaseModel]) -> None:
    marks = {mark.name: (mark, default) for mark, _, default in settings_of(config)}
    for name, (mark, default) in marks.items():
        field = section.model_fields[name]
        assert (field.description, field.default) == (mark.about, default)
    given = SimpleNamespace(**{name: object() for name in marks})
    computed: dict[str, object] = {}
    if config is RouterConfig:
        computed = {"model_path": "m"}
    if config is VerifierConfig:
        computed = {"model_name": "m", "target": filled(TargetConfig, given, model_path="m")}

    def values(config: object) -> Iterator[object]:
        for each in fields(config):  # type: ignore[arg-type]
            value = getattr(config, each.name)
            yield from values(value) if is_dataclass(value) else (value,)

    arrived = list(values(filled(config, given, **computed)))
    assert [name for name, value in vars(given).items() if not any(value is each for each in arrived)] == []


def test_what_is_built_has_the_values_that_were_set() -> None:
    flags = [
        "max_num_seqs=3",
        "stages=1",
        "max_nodes=7",
        "budget=fixed",
        "kv_cache_tokens=128",
        "max_wait_s=2.5",
        "weights=float32",
    ]
    settings = load(None, [f"verifier.{flag}" for flag in flags], {})
    model = ResolvedModel(name="m", path=Path("m"))
    verifier = component_configs.verifier_config(settings, model)
    assert (verifier.loop.max_num_seqs, verifier.max_nodes, verifier.budget, verifier.loop.max_wait_s) == (
        3,
        7,
        "fixed",
        2.5,
    )
    assert (verifier.target.kv_cache_tokens, verifier.target.weights) == (128, "float32")
    assert verifier.target.pass_rows == 3 * 8 + 256 and verifier.target.pass_requests == 3
    assert verifier.loop.max_batched_tokens == 256
    on_gpu = ["verifier.device=cuda:1", "verifier.dtype=bfloat16"]
    for further, most in (([], 2048), (["verifier.max_batched_tokens=77"], 77)):
        other = component_configs.verifier_config(load(None, [*on_gpu, *further], {}), model)
        assert (other.loop.max_batched_tokens, other.target.pass_rows) == (most, 16 * 65 + most)
    assert verifier.target.kernels_dir == settings.cache_dir / component_configs.KERNELS and verifier.costs_dir is not None
    flags = [
        "router.migration_timeout_s=5",
        "router.num_speculative_tokens=9",
        "server.privacy=strict",
        "server.privacy_tokens=4",
    ]
    settings = load(None, flags, {})
    router = component_configs.router_config(settings, model)
    assert (router.migration_timeout_s, router.strategy.num_speculative_tokens, router.model_path) == (5, 9, "m")
    assert (
        component_configs.server_config(settings).privacy.strict
        and component_configs.server_config(settings).privacy.tokens == 4
    )


def test_what_the_code_reads_of_a_section_is_there() -> None:
    """The type checker knows a section by the classes that its settings are marked in, which have more fields."""
    settings = load(None, (), {})
    read = {
        found
        for package in ("cluster", "cli", "benchmarks", "training", "lab")
        for path in (ROOT / package).rglob("*.py")
        for found in re.findall(r"\bsettings\.(router|verifier|drafter|retrieval|server)\.([a-z_]+)", path.read_text())
    }
    assert len(read) >= 30
    assert [name for name in sorted(read) if not hasattr(getattr(settings, name[0]), name[1])] == []
