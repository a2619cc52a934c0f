"""A method of tests that overrides one of the product says so, and there is one: whoever renames a method finds its stand-ins.

mypy checks the same of the product (``explicit-override``), but reads no tests.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_Method = ast.FunctionDef | ast.AsyncFunctionDef
# As mypy has it.
_FREE = {"__init__", "__new__", "__post_init__", "__init_subclass__"}
# Bases without methods of their own.
_EMPTY = {"Protocol", "Generic", "ABC", "object"}


class Source:
    """A module's classes, also by name, and what it imports, by the name that it has here."""

    def __init__(self, text: str) -> None:
        self.nodes: list[ast.ClassDef] = []
        self.classes: dict[str, ast.ClassDef] = {}
        self.imported: dict[str, str] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                self.nodes.append(node)
                self.classes[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Import):
                self.imported |= {each.asname or each.name: each.name for each in node.names}


@functools.cache
def source_of(module: str) -> Source | None:
    """A module of ours; None: it is none."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py", ROOT / "sdk" / path.relative_to(ROOT).with_suffix(".py")):
        if file.is_file():
            return Source(file.read_text())
    return None


Found = tuple[Source, ast.ClassDef]


def bases_of(found: Found) -> Iterator[Found | None]:
    """A class's bases, theirs included; None for each that is not ours."""
    source, node = found
    for base in node.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        own = _find(source, name)
        if name not in _EMPTY:
            yield own
        if own is not None:
            yield from bases_of(own)


def _find(source: Source, name: str) -> Found | None:
    if name in source.classes:
        return source, source.classes[name]
    first, _, rest = name.partition(".")
    if first not in source.imported:
        return None
    module, _, last = ".".join(part for part in (source.imported[first], rest) if part).rpartition(".")
    other = source_of(module)
    return None if other is None else _find(other, last)


def names_in(node: ast.ClassDef) -> set[str]:
    """What a class defines."""
    methods = {each.name for each in node.body if isinstance(each, _Method)}
    fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
    given = {
        name.id for each in node.body if isinstance(each, ast.Assign) for name in each.targets if isinstance(name, ast.Name)
    }
    return methods | fields | given


def faults_in(source: Source) -> list[str]:
    """Methods that override one and do not say so, and those that say so and override none."""
    faults = []
    for node in source.nodes:
        bases = [*bases_of((source, node))]
        known = {name for base in bases if base is not None for name in names_in(base[1])}
        foreign = None in bases
        for method in node.body:
            if not isinstance(method, _Method) or method.name in _FREE:
                continue
            says = any(ast.unparse(each) == "override" for each in method.decorator_list)
            if method.name in known and not says:
                faults.append(f"{node.name}.{method.name} overrides a method and does not say so")
            if says and method.name not in known and not foreign:
                faults.append(f"{node.name}.{method.name} overrides no method")
    return faults


def test_stand_ins_override_what_there_is() -> None:
    sources = {file: Source(file.read_text()) for file in (ROOT / "tests").rglob("*.py")}
    assert sum(len(source.nodes) for source in sources.values()) > 300
    assert {str(file.relative_to(ROOT)): faults for file, source in sources.items() if (faults := faults_in(source))} == {}


def test_a_renamed_method_is_found() -> None:
    before = "from speculation.estimators import Ratio\nclass Mine(Ratio):\n    {0}def {1}(self, factor): ...\n"
    assert faults_in(Source(before.format("@override\n    ", "keep"))) == []
    assert faults_in(Source(before.format("", "keep"))) == ["Mine.keep overrides a method and does not say so"]
    assert faults_in(Source(before.format("@override\n    ", "kept"))) == ["Mine.kept overrides no method"]
    assert faults_in(Source(before.format("", "kept"))) == []
