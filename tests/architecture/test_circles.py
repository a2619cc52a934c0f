"""No module needs, through others, itself: neither at run time nor for its types."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("speculation", "services", "retrieval_index", "cluster", "benchmarks", "training", "tour", "cli", "lab")


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(tree: ast.AST, modules: set[str]) -> set[str]:
    """Our modules that a module imports anywhere, in functions and for types as well."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            # A package that is only gone through is not needed for what it holds itself.
            found |= inside or {node.module}
    return found & modules


def _order(graph: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(graph).static_order())


def test_modules_are_in_no_circle() -> None:
    files = {_name(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    graph = {name: _imported(ast.parse(path.read_text()), set(files)) - {name} for name, path in files.items()}
    assert sum(map(len, graph.values())) > 1000
    _order(graph)


def test_a_planted_circle_is_found() -> None:
    modules = {"a.x", "a.y"}
    graph = {
        "a.x": _imported(ast.parse("from a import y"), modules),
        "a.y": _imported(ast.parse("def late():\n    from a.x import thing"), modules),
    }
    with pytest.raises(CycleError):
        _order(graph)
