"""The README is short, and its figures are those of docs/benchmarks.md. Where its links lead is tested in test_links.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lab.passes_picture import DRAWN, RECORDED, drawn

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
_CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]+`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
# Numbers that are no measurements: versions, sizes of what is fetched, of the model and of the machine, counts of this page.
_NO_FIGURES = {"0.1", "3.11", "93", "135", "512", "50051", "8000", "2.0"}


def figures(text: str) -> set[str]:
    """The numbers of a page outside code and links; those below ten only where a figure follows or they have decimals."""
    found = re.findall(r"(?<![\w.#-])\d[\d,]*(?:\.\d+)?", _CODE.sub(" ", text))
    return {number for number in found if "." in number or len(number) > 1} - _NO_FIGURES


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_its_figures_stand_among_the_benchmarks() -> None:
    measured = README
    # What docs/models.md and docs/how-to/faults.md hold.
    for sentence in re.findall(r"^- \*\*(?:Models|Deaths)\.\*\*.*$", README, re.MULTILINE):
        measured = measured.replace(sentence, "")
    found = figures(measured)
    assert len(found) >= 10
    # The table rounds 123.1 to 123.
    assert [each for each in sorted(found) if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", BENCHMARKS)] == []


def test_the_worst_group_is_in_its_table() -> None:
    groups = BENCHMARKS.partition("**Speed-up over plain decoding, task by task**")[2].partition("**Tokens per pass")[0]
    gains = {
        name: float(re.findall(r"\d\.\d\d", cell)[0])
        for name, cell in re.findall(r"^\| (\w+) \|.*\| ([^|]*) \|$", groups, re.MULTILINE)
        if re.search(r"\d\.\d\d", cell)
    }
    least = min(gains.values())
    assert len(gains) == 6 and f"| worst group: questions with short answers | | | {least:.2f}" in README


def test_the_number_of_types_is_the_table_s() -> None:
    rows = re.findall(
        r"^\| [\w-]+ \| (yes|no)\b", (ROOT / "docs/models.md").read_text().partition("| type |")[2], re.MULTILINE
    )
    assert f"[{rows.count('yes')} of {len(rows)} types]" in README


def test_the_picture_is_drawn_from_its_record() -> None:
    answers = json.loads(RECORDED.read_text())
    assert drawn(answers) == DRAWN.read_text()
    assert sum(map(len, answers["plain"])) == sum(map(len, answers["ours"]))
    assert f"takes {len(answers['plain'])} passes of the model, Outrider takes {len(answers['ours'])};" in README
