"""One name, one thing: no two modules and no two public classes are called the same."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("speculation", "services", "retrieval_index", "cluster", "benchmarks", "training", "cli")
# What a component has by definition; the codec, which is named after the protos; the SDK, which mirrors what users see.
ROLES = {"config.py", "service.py", "__init__.py", "__main__.py"}
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if path.parent.name != "codec"]


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.name for path in SOURCES if path.name not in ROLES)
    assert len(names) > 150
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_classes_have_one_name() -> None:
    # Peers are plug-ins, run each in a process of its own.
    classes = Counter(
        node.name
        for path in SOURCES
        if path.parent.name != "peers"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert len(classes) > 150
    assert [name for name, count in classes.items() if count > 1] == []
