"""Values that YAML's own reader fails on by all kinds of exceptions: everybody who reads YAML says so in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cli.plan_command import _yaml
from cluster.checks.offered import in_manifests
from cluster.settings.config import load
from services.access.key_records import read_keys
from services.router.rules.reading import read_rules_file
from services.router.strategies import StrategyConfig
from services.yaml_text import read_documents, read_yaml
from speculation.errors import ConfigurationError
from training.recipe import load_recipe

ODD = {
    "no such date": "2024-13-45",
    "no truth": "!!bool x",
    "no number": "!!int ''",
    "a number that is too long": "9" * 5000,
    "no time": "!!timestamp x",
    "too deep": "[" * 5000,
    "no YAML": "[",
    "no such zone": "2001-12-14t21:59:43.10-99:00",
}


def _in_manifests(file: Path) -> object:
    content = file.read_text()
    odd = "\n".join(f"    {line}" for line in content.splitlines())
    return in_manifests(f"data:\n  outrider.yaml: |-\n{odd}\n  pods.yaml: ''\n", str(file))


READERS: dict[str, Callable[[Path], object]] = {
    "settings": load,
    "a flag": lambda file: load(flags=[f"server.api_key_hashes=[{file.read_text()}"], environ={}),
    "keys": read_keys,
    "rules": lambda file: read_rules_file(file, StrategyConfig()),
    "a recipe": lambda file: load_recipe(str(file)),
    "pods": _yaml,
    "manifests": lambda file: in_manifests(file.read_text(), str(file)),
    "settings in manifests": _in_manifests,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_it_is_told_in_one_line(reader: str, odd: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(f"a: {ODD[odd]}\n" if reader in ("settings", "a recipe") else f"{ODD[odd]}\n")
    with pytest.raises(ConfigurationError) as caught:
        READERS[reader](file)
    assert "\n" not in str(caught.value)


def test_a_mapping_is_wanted_of_settings_in_manifests(tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("- 1")
    with pytest.raises(ConfigurationError, match="must hold a mapping"):
        _in_manifests(tmp_path / "odd.yaml")


@pytest.mark.parametrize("odd", ODD)
def test_errors_are_of_one_kind(odd: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_yaml(ODD[odd])
    with pytest.raises(ValueError):
        read_documents(ODD[odd])
    assert caught.type is ValueError and "\n" not in str(caught.value)


SECRETIVE = ["[S3cret", "{S3cret", "a: *S3cret", "a: !S3cret x", "a: 'S3cret", "- !S3'cret x\n", "a: S3cret: b"]


@pytest.mark.parametrize("text", SECRETIVE)
def test_no_error_quotes_what_was_written(text: str) -> None:
    with pytest.raises(ValueError, match=r"\(line \d+, column \d+\)$") as caught:
        read_yaml(text)
    assert "cret" not in str(caught.value) and caught.value.__cause__ is None
