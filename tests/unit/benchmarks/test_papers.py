"""The runner of papers: it goes on where it was, refuses another run's folder, tells of changed answers, makes the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.records import Request
from benchmarks.papers import blog, disco, fspad, spectra, streaming
from benchmarks.papers.engine import PLAIN, Decoded, RowDrafting, differs_at
from benchmarks.papers.page import PaperSection, section_text, write_page
from benchmarks.papers.rows import DecodedRow, macro_speed_up, speed_up, step_cost, tau, training_losses
from benchmarks.papers.run import changed_answers, measure_units
from benchmarks.papers.store import PaperFolder, read_run
from benchmarks.papers.units import Paper
from speculation.errors import ConfigurationError
from speculation.types import SamplingParams
from tests.running.refusals import refuses

REQUESTS = [Request(id=f"r/{n}", task="mt", prompt=(1, 2, n), seed=n) for n in range(3)]
IDENTITY = {"paper": "spectra", "seed": 1, "quick": True}
TOLD = {
    "command": "outrider paper spectra", "model": "toy", "prompts": "builtin", "requests": 3, "max_tokens": 4,
    "processor": "an abacus", "instructions": "avx2", "threads": 2, "deviations": ["Beads, not tensors."],
}  # fmt: skip


@dataclass
class Counting:
    """A decoder whose drafts bring two tokens a pass. ``wrong``: the request whose drafted answer has another third token."""

    wrong: str = ""
    drafted: list[RowDrafting] = field(default_factory=list)
    plainly: list[bool] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return len(self.plainly)

    def draft(self, drafting: RowDrafting) -> None:
        self.drafted.append(drafting)

    def answer(self, request: Request, params: SamplingParams, *, plainly: bool = False) -> Decoded:
        self.plainly.append(plainly)
        tokens = [7, 7, 7, 7]
        if request.id == self.wrong and not plainly:
            tokens[2] = 8
        arrivals = [(0.1 * n, 1) for n in range(1, 5)] if plainly else [(0.1, 2), (0.2, 2)]
        return Decoded(tokens=tuple(tokens), arrivals=tuple(arrivals), drafted_by={"anpd": 4}, accepted_by={"anpd": 2})


def row(decoder: Counting, name: str = "anpd", requests: Sequence[Request] = REQUESTS) -> DecodedRow:
    return DecodedRow(
        name=name, label=name.upper(), paper="9.99x", decoder=lambda: decoder, drafting=lambda: PLAIN,
        requests=lambda: requests, answers=len(requests), max_tokens=4,
    )  # fmt: skip


@contextmanager
def silent(unit: str, answers: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def folder(path: Path, *units: DecodedRow, **changed: Any) -> PaperFolder:
    return PaperFolder(path, {**IDENTITY, **changed}, {**TOLD, "units": [unit.name for unit in units]})


def section(path: Path, paper: Paper = spectra.PAPER) -> PaperSection:
    run, results = read_run(path)
    return PaperSection(paper=paper, run=run, results=results)


def test_a_second_call_goes_on_where_it_was(tmp_path: Path) -> None:
    first, second = Counting(), Counting()

    def interrupted() -> Sequence[Request]:
        raise KeyboardInterrupt

    stopped = replace(row(second, "lookahead"), requests=interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_units([row(first), stopped], folder(tmp_path, row(first), stopped), silent)
    assert first.answered and section(tmp_path).missing == ["lookahead"]
    before = first.answered
    units = [row(first), row(second, "lookahead")]
    measure_units(units, folder(tmp_path, *units), silent)
    assert first.answered == before and second.answered == 1 + 2 * len(REQUESTS)
    assert section(tmp_path).missing == []


def test_a_rows_engine_is_opened_once_its_requests_are_made() -> None:
    """They may take another engine, and there is one at a time: a run that went on with such a row alone ended in an error."""
    opened: list[str] = []

    def requests() -> Sequence[Request]:
        opened.append("requests")
        return REQUESTS

    def decoder() -> Counting:
        opened.append("decoder")
        return Counting()

    replace(row(Counting()), requests=requests, decoder=decoder).measure(lambda: None)
    assert opened == ["requests", "decoder"]


def test_neither_plain_decoding_nor_a_row_always_comes_first(tmp_path: Path) -> None:
    decoder = Counting()
    measure_units([row(decoder)], folder(tmp_path, row(decoder)), silent)
    assert decoder.plainly[1:] == [True, False, False, True, True, False]


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    folder(tmp_path)
    with refuses(ConfigurationError, field="--out", value=tmp_path, says="seed 1, and this one has 2"):
        folder(tmp_path, seed=2)
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "run.json").write_text('{"settings": ["retrieval.redis_url=redis://reader:secret@here"]}')
    with refuses(ConfigurationError, field="--out", value="older", says="redis://reader:...@here'], and this one has null"):
        PaperFolder(tmp_path / "older", {"settings": None}, TOLD)
    (tmp_path / "file").write_text("")
    with refuses(ConfigurationError, field="--out", value="file"):
        folder(tmp_path / "file")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_results_are_named(tmp_path: Path, content: str) -> None:
    unit = row(Counting())
    measure_units([unit], folder(tmp_path, unit), silent)
    (tmp_path / "units" / "anpd.json").write_text(content)
    with refuses(ConfigurationError, field="anpd.json", says="delete it"):
        read_run(tmp_path)
    with refuses(ConfigurationError, field="run.json", says="name the --out folder of a run"):
        read_run(tmp_path / "nowhere")


def test_a_changed_answer_is_told_everywhere(tmp_path: Path) -> None:
    units = [row(Counting(wrong="r/1")), row(Counting(), "lookahead")]
    measure_units(units, folder(tmp_path, *units), silent)
    found = section(tmp_path)
    assert changed_answers(found.results) == ["anpd: r/1 at token 2"]
    assert found.as_object()["changed"] == ["anpd: r/1 at token 2"]
    text = section_text(found)
    assert "NOT LOSSLESS: 1 answers" in text and "2 of 3 **CHANGED**" in text and "| 3 of 3 |" in text


def test_answers_are_compared_token_for_token() -> None:
    assert differs_at((1, 2), (1, 2)) is None
    assert [differs_at(*pair) for pair in [((1, 2), (1, 3)), ((1,), (1, 2)), ((1, 2), (1,)), ((), (1,))]] == [1, 1, 1, 0]


def test_figures_of_a_row() -> None:
    answers = row(Counting()).measure(lambda: None)["answers"]
    assert tau(answers) == 2.0
    # 0.3 seconds from the first token to the last, against 0.1; in the steps after the first, 10 and 20 tokens a second.
    assert speed_up(answers) == pytest.approx(3.0)
    assert macro_speed_up(answers) == pytest.approx(2.0)
    # Which is two tokens in as long as plain decoding takes for one.
    assert step_cost(answers) == pytest.approx(1.0)


def test_the_page_has_figures_of_both_and_says_what_it_was_made_of(tmp_path: Path) -> None:
    run = tmp_path / "run"
    units = [row(Counting()), replace(row(Counting(), "core"), label="CORE Module")]
    late = row(Counting(), "lookahead")
    measure_units(units, folder(run, *units, late), silent)
    page = tmp_path / "docs" / "papers.md"
    page.parent.mkdir()
    write_page(page, [section(run)], ["disco"], page.parent / "plots" / "papers")
    text = page.read_text()
    # The paper's own figure of Table 1, and the row's of Table 2.
    assert (
        "| ANPD | 3.00x | 2.00 | 1.0 | 3 of 3 | 1.43x |" in text
        and "| CORE Module | 3.00x | 2.00 | 1.0 | 3 of 3 | 9.99x |" in text
    )
    assert "1. A quick run" in text and "2. Beads, not tensors." in text
    assert "an abacus (avx2), 2 threads" in text and "seeds from 1" in text
    assert "Not measured yet: lookahead." in text and "Not measured: `outrider paper disco` does it." in text
    assert "(plots/papers/spectra-steps.svg)" in text and (page.parent / "plots/papers/spectra-steps.svg").is_file()
    assert json.loads(json.dumps(section(run).as_object()))["tables"][0]["rows"][0]["in the paper"] == "1.43x"


@pytest.mark.examples(3)
@pytest.mark.parametrize(
    ("paper", "units", "drawn"),
    [
        (fspad.PAPER, ["fspad", "eagle"], {"fspad-methods.svg", "fspad-losses.svg"}),
        (fspad.PAPER, ["pld"], {"fspad-methods.svg"}),
        (fspad.PAPER, ["fspad-half"], set()),
        (streaming.PAPER, ["ss", "ss-two-steps", "gamma-1"], {"streaming-methods.svg", "streaming-gamma.svg"}),
        (blog.PAPER, ["ngram"], {"blog-methods.svg"}),
    ],
)
def test_a_page_has_the_plots_that_there_are_figures_for(
    tmp_path: Path, paper: Paper, units: list[str], drawn: set[str]
) -> None:
    # FSPAD's record has its losses, EAGLE's has none.
    losses = {"losses": {"step": [10, 20], "divergence": [3.0, 2.0], "states": [0.5, 0.25]}}
    made = [replace(row(Counting(), name), extra=lambda name=name: losses if name == "fspad" else {}) for name in units]
    parameters = {"parameters": 7}
    if paper is streaming.PAPER:
        made = [replace(each, extra=lambda: parameters) for each in made]
    measure_units(made, folder(tmp_path / "run", *made), silent)
    write_page(tmp_path / "page.md", [section(tmp_path / "run", paper)], [], tmp_path / "plots")
    assert {file.name for file in (tmp_path / "plots").iterdir()} == drawn
    assert all(f"(plots/{name})" in (tmp_path / "page.md").read_text() for name in drawn)
    if "fspad" in units:
        text = (tmp_path / "plots" / "fspad-losses.svg").read_text()
        assert "FSPAD: divergence" in text and "FSPAD: states" in text and "EAGLE:" not in text


def test_losses_come_from_a_drafters_record(tmp_path: Path) -> None:
    assert training_losses(tmp_path) == {}
    for record in ({}, {"losses": None}, {"losses": {"step": []}}):
        (tmp_path / "training.json").write_text(json.dumps(record))
        assert training_losses(tmp_path) == {}
    curves = {"step": [1], "divergence": [2.0]}
    (tmp_path / "training.json").write_text(json.dumps({"losses": curves}))
    assert training_losses(tmp_path) == {"losses": curves}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ([], {}),
        (["static 3 SL-opt"], {"Static SL-opt": "0 of 1 tasks **CHANGED**"}),
        (["heuristic_transient"], {}),
        (["disco", "oracle"], {"DISCO": "0 of 1 tasks **CHANGED**", "Oracle": "0 of 1 tasks **CHANGED**"}),
    ],
)
def test_disco_tells_which_policy_changed_an_answer(changed: list[str], told: dict[str, str]) -> None:
    names = ("plain", "static 5", "static 3 SL-opt", "heuristic", "heuristic_transient", "disco", "oracle")
    policies = [{"name": name, "seconds": [2.0 if name == "plain" else 1.0], "f1": 0.5} for name in names]
    result = {
        "task": "qa", "theta": 0.5, "best": 3, "policies": policies, "oracle": [[2, 4], []], "changed_policies": changed,
        "changed": changed,
    }  # fmt: skip
    speeds, lengths, f1 = disco.PAPER.tables({"task-1": result})
    same = {row[0]: row[2] for row in speeds.rows}
    assert {label: same[label] for label in told} == told
    assert {text for label, text in same.items() if label not in told} == {"1 of 1 tasks"}
    assert {row[0]: row[1] for row in speeds.rows}["DISCO"] == "2.00x"
    assert lengths.rows[0][1] == "3.0 ± 1.0" and [row[1] for row in f1.rows] == ["50", "50"]


def test_disco_shows_how_classifiers_transfer() -> None:
    cells = [
        {"trained": trained, "measured": measured, "f1": 0.5, "auc": 0.7, "speed": 1.25 if trained == measured else 0.9}
        for trained in ("code", "chat")
        for measured in ("code", "chat")
    ]
    (table,) = disco.PAPER.tables({"transfer": {"cells": cells, "changed": []}})
    assert table.columns == ("trained on", "code", "chat", "in the paper")
    assert [row[:3] for row in table.rows] == [("code", "50, 1.25x", "50, 0.90x"), ("chat", "50, 0.90x", "50, 1.25x")]
