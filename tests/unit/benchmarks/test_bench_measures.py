"""The benchmark's arithmetic, on numbers that can be checked by hand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.bench import environment, measures
from benchmarks.bench.compare import compare, verdict
from benchmarks.bench.contestants import answer_of
from benchmarks.bench.differences import check
from benchmarks.bench.measure import ALL_TASKS, Measurements, Schedule, measure, requests_of
from benchmarks.bench.measures import Spread
from benchmarks.bench.records import Cell, ContestantFailed, LoadOutcome, LoadPoint, Request, TimedAnswer
from benchmarks.bench.results import cumulative_tokens
from benchmarks.bench.summary import summarise, verdict_line
from benchmarks.bench.tables import all_tables, ratio, render
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

SCHEDULE = Schedule(concurrency=(1, 4), repeats=2, max_tokens=8, temperature=0.0)
REQUESTS = [
    Request(id=f"{task}/{i}", task=task, prompt=(1, 2), seed=i) for task, n in (("a", 2), ("b", 1)) for i in range(n)
]


def answer(*arrivals: tuple[float, int], histogram: tuple[int, ...] = (), seconds_saved: float | None = None) -> TimedAnswer:
    tokens = tuple(range(sum(n for _, n in arrivals)))
    return TimedAnswer(tokens=tokens, arrivals=arrivals, histogram=histogram, seconds_saved=seconds_saved)


def cell(name: str, seconds: float, tokens: int = 10, repeat: int = 0, task: str = "a", concurrency: int = 1) -> Cell:
    outcome = LoadOutcome(answers=(answer((seconds, tokens)),), wall_s=seconds)
    return Cell(contestant=name, task=task, concurrency=concurrency, repeat=repeat, outcome=outcome)


class Scripted:
    """Answers at once; notes when it was asked."""

    def __init__(self, name: str, log: list[str], most_at_once: int | None = None, fails_at: int | None = None) -> None:
        self.name, self.most_at_once = name, most_at_once
        self._log, self._fails_at, self._asked = log, fails_at, 0

    def run(self, load: LoadPoint) -> LoadOutcome:
        self._log.append(self.name)
        self._asked += 1
        if self._asked == self._fails_at:
            raise ContestantFailed("planted")
        return LoadOutcome(answers=tuple(answer((1.0, 2)) for _ in load.requests), wall_s=1.0)


def test_results_name_the_commit_of_the_checkout() -> None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    named = environment.commit()
    assert named is not None and head.startswith(named.removesuffix("+"))


def test_tau_counts_the_bonus_token() -> None:
    # Three passes that accept 0, 0 and 2 drafted tokens commit 1 + 1 + 3.
    assert measures.tau([answer((1, 5), histogram=(2, 0, 1))]) == pytest.approx(5 / 3)
    assert measures.tau([answer((1, 5))]) is None


def test_seconds_saved_are_those_of_an_answer_on_average() -> None:
    assert measures.seconds_saved([answer((1, 5), seconds_saved=0.5), answer((1, 5), seconds_saved=-0.25)]) == 0.125
    assert measures.seconds_saved([answer((1, 5))]) is None
    told = answer_of({"tokens": [1], "arrivals": [[0.5, 1]], "histogram": [1], "seconds_saved": -0.25})
    assert told.seconds_saved == -0.25
    assert answer_of({"tokens": [1], "arrivals": [[0.5, 1]]}).seconds_saved is None


def test_the_report_shows_what_drafting_saved_an_answer() -> None:
    loop = {
        "times": {"steps": 1, "seconds": {}}, "nodes_by_source": {}, "accepted_by_source": {},
        "drafts_used": 0, "drafts_ahead": 0, "drafting_s": 0.0,
    }  # fmt: skip
    outcome = LoadOutcome(answers=(answer((1.0, 2), seconds_saved=-0.25),), wall_s=1.0, loop=loop)
    records = summarise([Cell(contestant="blend", task="a", concurrency=1, repeat=0, outcome=outcome)], "plain", [])
    results = {
        "settings": {"concurrency": [1], "requests": 1, "base": "plain", "strategies": ["plain", "blend"], "peers": []},
        "contestants": {}, "summary": records, "lossless": {"checks": [], "differences": []},
    }  # fmt: skip

    def shown() -> str:
        (inside,) = (table for table in all_tables(results) if table.title.startswith("Inside"))
        return inside.rows[0][inside.columns.index("saved/answer")]

    assert shown() == "-0.25"
    # Results of an earlier version can still be shown.
    del records[0]["seconds_saved"]
    assert shown() == "–"


def test_a_line_under_the_table_says_who_did_not_draft() -> None:
    """As printed by ``outrider bench``, over both cells of a contestant."""
    nothing = {"times": {"steps": 1, "seconds": {}}, "nodes_by_source": {}, "accepted_by_source": {},
               "drafts_used": 0, "drafts_ahead": 0, "drafting_s": 0.0}  # fmt: skip
    left_out = {
        "source_choices": {"fspad": {"too_costly": 4, "trial": 1, "given_up": 1}},
        "weighed": {"fspad": {"times": 5, "brings": 1.4, "costs": 1.7}},
    }
    named = {
        "named": {
            "draft_model": {"answers": 3, "steps": 50, "answers without": 2, "deadline": 7, "share": 1},
            "suffix": {"answers": 3, "steps": 50, "answers without": 0},
        }
    }
    loops = {"fspad": (left_out, left_out), "auto": (left_out,), "draft_model": (named, named), "suffix": ({},), "plain": ()}
    cells = [
        Cell(
            contestant=name, task=f"{number}", concurrency=1, repeat=0,
            outcome=LoadOutcome(answers=(answer((1.0, 2)),), wall_s=1.0, loop={**nothing, **loop}),
        )
        for name, told in loops.items() for number, loop in enumerate(told)
    ]  # fmt: skip
    results = {
        "settings": {"concurrency": [1], "requests": 1, "base": "plain", "strategies": [*loops], "peers": []},
        "contestants": {}, "summary": summarise(cells, "plain", []), "lossless": {"checks": [], "differences": []},
    }  # fmt: skip
    (inside,) = (table for table in all_tables(results) if table.title.startswith("Inside"))
    lines = (
        "fspad: left out in 8 of 10 answers, given up in 2 of 10, costs 34 % a step, brings 28 %",
        "auto: fspad left out in 4 of 5 answers, given up in 1 of 5, costs 34 % a step, brings 28 %",
        "draft_model: did not always draft in 4 of 6 answers: of 100 steps, others would have lost more than "
        "verifier.named_share in 2, not there within verifier.named_deadline_s in 14",
    )
    console = Console(width=300, record=True)
    console.print(render(inside))
    printed = " ".join(console.export_text().split())
    assert printed.endswith(" ".join(lines))
    # Results of an earlier version can still be shown.
    for record in results["summary"]:
        del record["loop"]["weighed"], record["loop"]["named"]
    (inside,) = (table for table in all_tables(results) if table.title.startswith("Inside"))
    assert inside.note.splitlines()[0] == "fspad: left out in 8 of 10 answers, given up in 2 of 10"


def test_acceptance_per_position_is_the_share_of_passes_that_reach_it() -> None:
    answers = [answer((1, 1), histogram=(2, 1, 0, 1)), answer((1, 1), histogram=(4,))]
    assert measures.acceptance_per_position(answers) == [2 / 8, 1 / 8, 1 / 8]


def test_latencies_are_to_the_first_token_and_between_tokens() -> None:
    found = measures.latencies([answer((0.5, 1), (0.7, 2), (1.1, 1)), answer((0.3, 4))])
    assert found["ttft_median_s"] == 0.3
    # The second answer came at once: it has no latency between tokens.
    assert found["itl_median_s"] == pytest.approx(0.6 / 3)
    assert found["gap_p99_s"] == pytest.approx(0.4)


def test_a_ratio_is_taken_repeat_by_repeat_over_what_both_have() -> None:
    ours = [cell("a", 1.0), cell("a", 2.0, repeat=1), cell("a", 1.0, task="b")]
    theirs = [cell("b", 2.0), cell("b", 8.0, repeat=1)]
    assert measures.ratio(ours[:2], theirs).values == (2.0, 4.0)
    assert measures.ratio([*ours, cell("a", 1.0, repeat=1, task="b")], theirs).values == (2.0, 4.0)
    assert measures.ratio(ours, []).values == ()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((1.5,), "one repeat"),
        ((1.0, 1.6, 1.3), "apart"),
        ((0.97, 1.08, 1.05), "both sides of 1"),
        ((1.5, 1.55, 1.6), None),
        ((0.99, 1.01, 1.0), None),
    ],
)
def test_a_ratio_says_when_it_means_little(values: tuple[float, ...], says: str | None) -> None:
    found = Spread(values).unclear
    assert (says is None) == (found is None)
    assert says is None or says in str(found)
    assert ratio(Spread(values).as_object()).startswith("unclear") == (says is not None)


def test_micro_counts_tokens_and_macro_tasks() -> None:
    cells = [cell("a", 1.0, tokens=10), cell("a", 3.0, tokens=2, task="b")]
    assert measures.speed(cells) == 3.0
    assert measures.macro_speed(cells) == pytest.approx((10 + 2 / 3) / 2)


def test_shares_of_the_wall_time_add_up() -> None:
    seconds = {"draft_wait": 2.0, "schedule": 0.5, "pass_and_verify": 5.0, "forward": 4.0, "choose": 0.5, "keep": 0.0}
    loop = {
        "times": {"steps": 10, "seconds": seconds},
        "nodes_by_source": {"s": 40},
        "accepted_by_source": {"s": 10},
        "drafts_used": 8,
        "drafts_ahead": 2,
        "drafting_s": 0.5,
    }
    answers = (answer((1.0, 1)),)
    outcome = LoadOutcome(answers=answers, wall_s=10.0, loop=loop)
    counts = measures.loop_counts([Cell(contestant="c", task="t", concurrency=1, repeat=0, outcome=outcome)])
    assert counts is not None
    assert counts["shares"] == pytest.approx({"draft": 0.05, "rpc": 0.15, "verify": 0.45, "other": 0.1, "idle": 0.25})
    assert sum(counts["shares"].values()) == pytest.approx(1)
    assert (counts["nodes_per_pass"], counts["acceptance_by_source"], counts["draft_ahead_hits"]) == (4.0, {"s": 0.25}, 0.25)


def test_who_ends_early_stays_in_the_cumulative_mean() -> None:
    assert cumulative_tokens([answer((1, 2), (2, 1)), answer((1, 4))]) == [3.0, 3.5]


def test_contestants_take_turns_and_another_one_is_first_each_round() -> None:
    log: list[str] = []
    measured = Measurements()
    measure([Scripted("A", log), Scripted("B", log)], REQUESTS, SCHEDULE, measured)
    # Two tasks one at a time, all together four at a time; twice.
    assert log == ["A", "B", "B", "A", "A", "B"] * 1 + ["B", "A", "A", "B", "B", "A"]
    assert [(c.contestant, c.task) for c in measured.cells[4:6]] == [("A", ALL_TASKS), ("B", ALL_TASKS)]


def test_no_load_is_always_measured_in_the_same_order() -> None:
    """As many loads as contestants: with an order by rounds alone the same one would come first at a load in every repeat."""
    log: list[str] = []
    schedule = Schedule(concurrency=(8, 24), repeats=2, max_tokens=8, temperature=0.0)
    measure([Scripted("A", log), Scripted("B", log)], REQUESTS, schedule, Measurements())
    assert log == ["A", "B", "B", "A", "B", "A", "A", "B"]


def test_who_fails_is_left_out_and_the_others_go_on() -> None:
    log: list[str] = []
    measured, told = Measurements(), []
    contestants = [Scripted("A", log), Scripted("B", log, fails_at=2), Scripted("C", log, most_at_once=1)]
    measure(contestants, REQUESTS, SCHEDULE, measured, told.append)
    assert measured.failures == {"B": "planted"}
    assert (log.count("A"), log.count("B"), log.count("C")) == (6, 2, 4)
    assert len(told) == 18


def test_tasks_are_mixed_where_several_requests_run_at_once() -> None:
    assert [request.id for request in requests_of(REQUESTS, ALL_TASKS)] == ["a/0", "b/0", "a/1"]


def test_a_difference_is_found_at_its_first_position() -> None:
    request = REQUESTS[0]
    outcomes = [(1, 2, 3), (1, 9, 3), (1, 2)]
    cells = [
        Cell(
            contestant="x", task=request.task, concurrency=1, repeat=i,
            outcome=LoadOutcome(answers=(TimedAnswer(tokens=tokens, arrivals=((1.0, 3),)),), wall_s=1.0),
        )
        for i, tokens in enumerate([*outcomes, outcomes[1]])
    ]  # fmt: skip
    checks, found = check(cells, [request], "plain", {request.id: (1, 2, 3)})
    assert [(c.equal, c.answers, c.lossless) for c in checks] == [(1, 4, False)]
    assert [(d.position, d.token, d.reference_token, d.times) for d in found] == [(1, 9, 2, 2), (2, None, 3, 1)]


def result(*cells: Cell, **settings: object) -> dict[str, object]:
    base = {
        "model": "m", "dtype": "float32", "device": "cpu", "on": "process", "requests": 1, "max_tokens": 8, "temperature": 0.0, "seed": 1,
        "strategies": ["a", "plain"],
    }  # fmt: skip
    environment = {"commit": "c", "processor": "p", "cores": 2, "gpus": [], "threads": 2, "python": "3"}
    return {
        "settings": base | settings,
        "environment": environment,
        "contestants": {},
        "requests": [],
        "partial": False,
        "summary": summarise(cells, "plain", ()),
    }


def test_only_what_does_not_overlap_is_a_change() -> None:
    a = result(
        *(cell("a", s, repeat=i) for i, s in enumerate((1.0, 1.1))), *(cell("plain", 2.0, repeat=i) for i in range(2))
    )
    b = result(
        *(cell("a", s, repeat=i) for i, s in enumerate((0.5, 0.5))), *(cell("plain", 2.1, repeat=i) for i in range(2))
    )
    tables = {table.title: table for table in compare(a, b)}
    assert "B is faster" in tables["Speed-up"].rows[0][-1]
    assert [row[-1].split(" (")[0] for row in tables["Tokens per second"].rows] == ["B is SLOWER", "B is faster"]
    same = compare(a, a)
    assert all("same within the spread" in row[-1] for table in same[1:] for row in table.rows)
    assert verdict(Spread(()).as_object(), Spread((1.0,)).as_object()) == "–"


def test_runs_of_different_work_are_not_compared() -> None:
    with refuses(ConfigurationError, field="max_tokens 8 and 16"):
        compare(result(cell("a", 1.0)), result(cell("a", 1.0), max_tokens=16))


def test_one_repeat_tells_no_change() -> None:
    one = result(cell("a", 1.0), cell("plain", 2.0))
    assert all("unclear: one repeat" in row[-1] for table in compare(one, one)[1:] for row in table.rows)


def test_a_repeat_that_was_cut_short_does_not_count() -> None:
    cells = [cell("a", 1.0), cell("a", 1.0, task="b"), cell("a", 5.0, repeat=1)]
    assert measures.by_repeat(cells, measures.speed).values == (10.0,)
    assert measures.ratio(cells, cells).values == (1.0,)


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [measures.percentile(values, share) for share in (0.01, 0.5, 0.95, 0.99, 1.0)] == [1.0, 50.0, 95.0, 99.0, 100.0]
    assert measures.percentile([1.0, 2.0], 0.5) == 1.0


def test_a_table_says_where_fewer_requests_than_wanted_were_at_once() -> None:
    cells = [cell("autoregressive", 1.0, concurrency=concurrency) for concurrency in (4, 16)]
    results = {
        "settings": {"concurrency": [4, 16], "requests": 9, "base": "autoregressive", "strategies": ["autoregressive"], "peers": []},
        "contestants": {}, "summary": summarise(cells, "autoregressive", []), "lossless": {"checks": [], "differences": []},
    }  # fmt: skip
    titles = [table.title for table in all_tables(results)]
    assert titles == ["Speed, 4 at once", "Speed, 16 at once: all 9 requests, there were no more"]


@pytest.mark.parametrize(
    ("equal", "said"), [(6, "all 6 answers equal plain decoding's"), (5, "NO: 1 of 6 answers differ from plain decoding")]
)
def test_the_verdict_names_the_worst_group_and_wrong_answers(equal: int, said: str) -> None:
    """Of the fastest strategy; peers are neither strategies nor promised to be equal."""
    seconds = {"plain": (2.0, 2.0), "slow": (1.9, 1.9), "fast": (0.5, 4.0), "hf": (0.1, 0.1)}
    cells = [
        cell(name, spent, task=task, repeat=repeat)
        for name, of_tasks in seconds.items()
        for task, spent in zip(("an_edit", "open"), of_tasks, strict=True)
        for repeat in range(2)
    ]
    checks = [
        {"contestant": "fast", "against": "plain", "equal": equal, "answers": 6},
        {"contestant": "hf", "against": "plain", "equal": 0, "answers": 6},
    ]
    results = {
        "settings": {"concurrency": [1], "base": "plain", "peers": ["hf"]},
        "summary": summarise(cells, "plain", ["hf"]),
        "lossless": {"checks": checks},
    }
    line = verdict_line(results)
    assert line.endswith(f"{said}.")
    assert line.startswith("slow is 1.05x")
    assert "its worst group, an edit: 1.05x" in line
    only_fast = results | {"summary": summarise([each for each in cells if each.contestant != "slow"], "plain", ["hf"])}
    assert "its worst group, open: 0.50x" in verdict_line(only_fast)


@pytest.mark.parametrize(
    "url",
    [
        "redis://reader:secret@here:6379",
        "redis://reader:secret/secret@secret#secret@here:6379/0",
        "rediss://here:6379?password=secret",
        "rediss://here:6379/1?ssl_password=secret&db=2",
        "redis://publisher@here:6379",
    ],
)
def test_what_was_typed_is_kept_without_passwords(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["bench", "--max-tokens=64", "--set", f"retrieval.redis_url={url}", "--prompts", "a b"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/outrider", *asked])
    told = environment.typed()
    assert shlex.split(told) == ["outrider", *(re.sub("secret([/@#]secret)*", "...", each) for each in asked)]
