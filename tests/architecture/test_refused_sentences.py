"""The file of the sentences in which something is refused: in order, and about tests that exist."""

from __future__ import annotations

import ast

from tests.refusals import ROOT, SENTENCES


def test_every_sentence_is_one_tests() -> None:
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    named = {line.partition(": ")[0] for line in lines}
    there = {
        f"{file}::{node.name}"
        for file in {test.partition("::")[0] for test in named}
        for node in ast.parse((ROOT / "tests" / file).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert sorted(named - there) == []
