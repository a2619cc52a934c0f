"""The file of the sentences in which something is refused: in order, and about tests that exist."""

from __future__ import annotations

import re

from tests.running.refusals import ROOT, SENTENCES

_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def test_every_sentence_is_one_tests() -> None:
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    named = {line.partition(": ")[0] for line in lines}
    there = {
        f"{file}::{test}"
        for file in {test.partition("::")[0] for test in named}
        for test in _TEST.findall((ROOT / "tests" / file).read_text(encoding="utf-8"))
    }
    assert sorted(named - there) == []
