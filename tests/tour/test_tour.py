"""The tour runs: every chapter ends, shows what it promises, and finds the tokens of plain decoding (it checks that itself)."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import tour.__main__ as tour
from tour import chapter3_why_sampling_stays_exact as sampling

ROOT = Path(__file__).parents[2]
# They share one loaded model.
pytestmark = pytest.mark.xdist_group("tour")
# What must be read in the output of each.
SHOWN = {
    "chapter1_plain_decoding": r"64 tokens, 64 passes.* ms each",
    "chapter2_a_guess_checked": r"15 of 16 guesses were right",
    "chapter3_why_sampling_stays_exact": r"seed 3: 32 tokens, the same in \d+ passes with guesses",
    "chapter4_trees": r"trees, 2 successors each: 64 tokens in \d+ passes",
    "chapter5_merging_sources": r"suffix and recycling +\d+ passes",
    "chapter6_the_budget": r"what pays +\d+ passes",
    "chapter7_a_drafter_that_lies": r"sure and wrong: .*\n +32 passes, \d+ ms per token; [1-9]\d* guesses checked, 0 right",
    "chapter8_a_drafter_behind_grpc": r"☠.*\d+ tokens, those of plain",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "chapter2_a_guess_checked" else pytest.mark.exhaustive)
        for name in tour.CHAPTERS
    ],
)
def test_a_chapter_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(f"tour.{name}").main()
    shown = capsys.readouterr()
    assert re.search(SHOWN[name], shown.out), shown.out
    assert "Try " in shown.out.split("\n\n")[-2], "it ends with something to try"


@pytest.mark.exhaustive
def test_draws_have_the_right_frequencies_and_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    sampling.draws_follow_the_distribution()
    sampling.draws_repeat()
    shown = capsys.readouterr().out
    said = [(float(p), float(drawn)) for p, drawn in re.findall(r"probability (\S+) +drawn (\S+)", shown)]
    assert len(said) == 4 and all(abs(p - drawn) < 0.01 for p, drawn in said)
    noise = re.findall(r"position 100: (.*)", shown)
    assert len(noise) == 2 and noise[0] == noise[1]


def test_the_list_names_all_chapters_and_a_wrong_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert tour.main([]) == 0
    shown = capsys.readouterr().out
    assert len(tour.CHAPTERS) == 8 and all(f"tour/{name}.py" in shown for name in tour.CHAPTERS)
    assert tour.main(["9"]) == 2
    assert "no such chapter: 9; there are 1 to 8" in capsys.readouterr().out


def test_it_fits_one_sitting() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "tour").glob("*.py")}
    assert sum(lines.values()) <= 1000, lines
