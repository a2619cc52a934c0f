"""The house keeps its shape: pages name what exists, files stay small, nothing unpickles, topology is named in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_origin

import pytest

import outrider
from speculation import limits

ROOT = Path(__file__).parents[2]
PACKAGES = ("speculation", "services", "retrieval_index", "cluster", "sdk/outrider", "benchmarks", "training", "tour", "cli")
SOURCES = {
    package: [path for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name] for package in PACKAGES
}


_UNPICKLE = {"pickle", "cloudpickle", "dill", "marshal"}
_LOADERS = {"torch.load", "np.load", "numpy.load", "pickle.load"}


def too_long(path: Path, tree: ast.Module) -> Iterator[str]:
    """What is longer than it may be."""
    if (lines := len(path.read_text().splitlines())) > 400:
        yield f"{lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > 60:
                yield f"{node.name} has {lines} lines"


def undocumented_or_unpickling(path: Path, tree: ast.Module) -> Iterator[str]:
    """What has no docstring, and what unpickles."""
    if path.read_text().strip() and not ast.get_docstring(tree):
        yield "a module without a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{node.name} has no docstring"
        if isinstance(node, ast.Import) and {alias.name.split(".")[0] for alias in node.names} & _UNPICKLE:
            yield ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in _LOADERS and path.name != "convert_pickles.py":
            yield ast.unparse(node)


@pytest.mark.parametrize("package", PACKAGES)
def test_files_stay_small_documented_and_without_pickles(package: str) -> None:
    """One test for a package: a test for each file would be a fifth of all tests."""
    found = []
    for path in SOURCES[package]:
        tree = ast.parse(path.read_text())
        faults = (*too_long(path, tree), *undocumented_or_unpickling(path, tree))
        found += [f"{path.relative_to(ROOT)}: {fault}" for fault in faults]
    assert SOURCES[package] and not found


def test_such_faults_are_found(tmp_path: Path) -> None:
    long, bare = tmp_path / "long.py", tmp_path / "bare.py"
    long.write_text("def f():\n" + "    x = 1\n" * 401)
    bare.write_text("import pickle\nclass Public: ...\nclass _Own: ...\ndef f(): torch.load(1); own.load(1)\n")
    assert list(too_long(long, ast.parse(long.read_text()))) == ["402 lines", "f has 401 lines"]
    assert list(undocumented_or_unpickling(bare, ast.parse(bare.read_text()))) == [
        "a module without a docstring", "import pickle", "Public has no docstring", "torch.load"
    ]  # fmt: skip


# A line that gives a module's name a value.
_GIVEN = re.compile(r"^([A-Za-z_]\w*)(?::[^=\n]+)? = ", re.MULTILINE)


def set_twice(text: str) -> list[str]:
    """The names of a module that are given a value more than once, as where two changes of a file were joined."""
    return [name for name, count in Counter(_GIVEN.findall(text)).items() if count > 1]


def test_no_name_of_a_module_is_set_twice() -> None:
    assert set_twice("ONE = 1\nTWO: int = 2\n\n\nTWO: int = 2\n    ONE = 3\nif ONE == 1:\n") == ["TWO"]
    files = [path for top in (*PACKAGES, "lab", "tests") for path in sorted((ROOT / top).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): set_twice(path.read_text()) for path in files if "_pb2" not in path.name}
    assert found and not {name: names for name, names in found.items() if names}


def test_pickled_weights_are_converted_as_tensors_alone() -> None:
    """The one exception from the rule above."""
    tree = ast.parse((ROOT / "training/convert_pickles.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    assert len(calls) == 1
    given = {word.arg: ast.unparse(word.value) for word in calls[0].keywords}
    assert given["weights_only"] == "True"


def test_only_the_cluster_knows_the_topology() -> None:
    words = re.compile(r"in_process|InProcess|Grpc|DeploymentHandle")
    for package in (
        "speculation",
        "retrieval_index",
        "services/router",
        "services/drafter",
        "services/retrieval",
        "services/verifier",
    ):
        for path in (ROOT / package).rglob("*.py"):
            assert not words.search(path.read_text()), path


def test_the_idea_imports_light() -> None:
    heavy = ("grpc", "ray", "transformers", "google.protobuf", "pydantic", "redis", "faiss", "marisa_trie")
    script = (
        f"import sys, services.verifier.engine.loop, speculation.ports; print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# What the event loops of other threads live by, and whoever else waits. What is replaced in a module of ours is that module's own.
_REPLACED = re.compile(r'\b(?:setattr|patch|object)\(\s*(?:"([\w.]+)"|([\w.]+),\s*"(\w+)")')
_EVERYBODYS = re.compile(r"(?:^|\.)(?:(?:asyncio|selectors|threading)\.\w+|time\.(?:monotonic|sleep|time))$")


def replaced_for_all(text: str) -> list[str]:
    replaced = (name or f"{owner}.{attribute}" for name, owner, attribute in _REPLACED.findall(text))
    return [each for each in replaced if _EVERYBODYS.search(each)]


def test_no_test_takes_the_clock_from_other_threads() -> None:
    """A service of other tests may run in one: a timer that it sets by a clock that says infinity never ends."""
    for planted in (
        'm.setattr(grammars.time, "monotonic", x)',
        'patch("asyncio.sleep")',
        'patch.object(\n time, "time", x)',
    ):
        assert replaced_for_all(planted), planted
    assert not replaced_for_all('m.setattr(grammars, "time", x); m.setattr(grammars, "asyncio", x)')
    files = {
        path: path.read_text(encoding="utf-8") for path in Path("tests").rglob("*.py") if path.name != Path(__file__).name
    }
    assert {str(path): found for path, text in files.items() if (found := replaced_for_all(text))} == {}


def test_the_protos_state_the_limits_that_are_enforced() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
    for value, words in (
        (limits.MAX_STOP_STRINGS, r"At most 16, each 1 to 256 characters"),
        (limits.MAX_STOP_TOKENS, r"At most 64"),
        (limits.MAX_LOGPROBS, r"At most 20"),
        (limits.MAX_LOGIT_BIAS, r"At most 1,024 entries"),
        (limits.MAX_TREE_NODES, r"At most 512 nodes"),
        (limits.MAX_SOURCES, r"at most 16, of at most 64"),
        (limits.MAX_PROPOSAL, r"At most 256 entries"),
        (limits.MAX_SESSION_TOKENS, r"At most 1,048,576"),
        (limits.MAX_LAYERS, r"output layer reads. At most 16"),
        (limits.MAX_FEATURE_WIDTH, r"multiple of their number; 1 to 262,144"),
        (limits.MAX_SESSION_TOKENS, r"position is below 1,048,576"),
        (limits.MAX_FEATURE_BYTES >> 20, r"At most 1 MiB in one message"),
        (limits.MAX_QUERIES, r"At most 256"),
        (limits.MAX_SUFFIX, r"At most 64"),
        (limits.MAX_CONTINUATIONS, r"At most 512"),
        (limits.MAX_HELD_MODELS, r"At most 64, each called by another name"),
        (limits.MAX_HELD_TENANTS, r"all may. At most 64, each at most 512 characters"),
        (limits.MAX_TENANT_CHARACTERS, r"all may. At most 64, each at most 512 characters"),
        (limits.MAX_WHEN_CHARACTERS, r"65,536 characters; empty: nothing"),
        (limits.MAX_DRAFTS, r"At most 8,192 drafts"),
        (limits.MAX_CARD_CHARACTERS, r"Each text has at most 4,096 characters"),
    ):
        assert re.search(words, text), words
        assert f"{value:,}" in words
    assert f"{limits.MAX_PUBLIC_MESSAGE_BYTES >> 20} MiB" in text
    assert f"{limits.MAX_VERIFY_MESSAGE_BYTES >> 20} MiB" in text


def test_the_sdk_exports_what_it_says() -> None:
    assert sorted(outrider.__all__) == outrider.__all__
    for name in outrider.__all__:
        # A Literal has no docstring; its name says what its words are.
        assert getattr(outrider, name).__doc__ or get_origin(getattr(outrider, name)) is Literal, name


def test_the_readmes_commands_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^    |`)make ([\w-]+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()
