"""Names: no two public classes are called the same, and pages that name files name what exists."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest

import speculation

ROOT = Path(__file__).parents[2]
PACKAGES = ("speculation", "services", "retrieval_index", "cluster", "benchmarks", "training", "tour", "cli")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def test_no_two_public_classes_have_one_name() -> None:
    # Peers are plug-ins, run each in a process of its own. The codec is named after the protos, and what is declared of HTTP's
    # bodies after their APIs.
    classes = Counter(
        node.name
        for path in SOURCES
        if path.parent.name not in ("peers", "codec", "protocol") and path.name != "protocol.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(classes) > 150
    assert [name for name, count in classes.items() if count > 1] == []


def test_the_idea_says_in_which_order_it_is_read() -> None:
    named = re.findall(r"``(\w+)``", speculation.__doc__ or "")
    modules = {module.name for module in pkgutil.iter_modules(speculation.__path__)}
    assert sorted(named) == sorted(modules)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", "docs/request_lifecycle.md", "docs/decisions.md"])
def test_pages_name_files_that_exist(page: str) -> None:
    file = ROOT / page
    top = "|".join((*PACKAGES, "docs", "tests", "k8s", "protos", "lab", "sdk", "drafters"))
    named = set(re.findall(rf"(?<![\w./])((?:{top})/[\w./-]*)", file.read_text()))
    assert named
    assert [
        name for name in sorted(named) if not (ROOT / name.rstrip("./")).exists() and not list(ROOT.glob(f"{name}*"))
    ] == []


def test_a_newcomer_finds_the_file_for_a_change() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(rows) >= 20
    for change, files in rows:
        for file in re.findall(r"`([^`]+)`", files):
            assert (ROOT / file).exists(), f"{change}: {file}"


def test_the_lifecycle_page_names_what_is_defined_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (ROOT / "docs" / "request_lifecycle.md").read_text())
    assert len(named) >= 50
    for file, symbol in named:
        module = importlib.import_module(file.removeprefix("sdk/").removesuffix(".py").replace("/", "."))
        found: object = module
        for part in symbol.split("."):
            found = getattr(found, part)
        # What a file only imports is to be read elsewhere. Values have no home of their own.
        assert getattr(found, "__module__", module.__name__) == module.__name__, f"{file}::{symbol}"
