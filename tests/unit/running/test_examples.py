"""The worked examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

FOLDERS = ("speculation", "services", "benchmarks", "cluster", "cli", "retrieval_index", "training")
MODULES = sorted(
    ".".join(path.with_suffix("").parts)
    for folder in FOLDERS
    for path in Path(folder).rglob("*.py")
    if "    >>> " in path.read_text() or "\n>>> " in path.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_do_what_they_say(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0, f"{module} has no example"
    assert result.failed == 0, "the output above says which"
