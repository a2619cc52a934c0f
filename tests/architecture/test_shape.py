"""The house keeps its shape: pages name what exists, files stay small, nothing unpickles, topology is named in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_origin

import pytest

import outrider
from speculation import limits

ROOT = Path(__file__).parents[2]
PACKAGES = ("speculation", "services", "retrieval_index", "cluster", "sdk/outrider", "benchmarks", "training", "tour", "cli")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in path.name]


# Of a module: both tests of a file run one after the other, and it is parsed once.
_EACH = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)), scope="module")


@lru_cache(maxsize=1)
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@_EACH
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{node.name} has {lines} lines"


@_EACH
def test_public_things_are_documented_and_nothing_unpickles(path: Path) -> None:
    tree = parsed(path)
    assert not path.read_text().strip() or ast.get_docstring(tree), "a module without a docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"pickle", "cloudpickle", "dill", "marshal"}
        if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
            assert node.value.id not in ("torch", "np", "numpy", "pickle") or path.name == "convert_pickles.py"


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
