"""The page in a real browser: runs that it saves and opens, and files that it refuses."""

from __future__ import annotations

import base64
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.contestants import order_of
from benchmarks.bench.records import LoadPoint, Request
from benchmarks.bench.results import TRACES, write_traces
from benchmarks.peers.peer_outrider import Peer
from services.api.http.page import PAGE
from services.router.tokens import Tokens
from tests.page.asking import answer_of, ask, kinds, saved
from tests.page.conftest import Open
from tests.servers.http_service import HttpService

pytestmark = [pytest.mark.xdist_group("page")]

NODES: dict[str, Any] = {
    "tokens": [5, 6, 7], "texts": [" b", " c", " x"], "parents": [-1, 0, 0], "sources": ["suffix", "suffix", "<b>odd</b>"],
    "probabilities": [0.9, 0.8, 0.1],
}  # fmt: skip
COMPARISON: dict[str, Any] = {
    "strategy": "recycling", "num_passes": 3, "tokens_per_pass": 1.25, "seconds": 0.05, "exact": False, "without": ["fspad"],
}  # fmt: skip
RUN: dict[str, Any] = {
    "format": "outrider-run", "version": 1, "model": "m", "strategy": "blend",
    "messages": [{"role": "user", "content": "say it"}], "text": "a b c d", "seed": "18446744073709551615", "finish": "stop",
    "tokens": [
        {"id": 4, "text": "a", "source": "target"}, {"id": 5, "text": " b", "source": "suffix"},
        {"id": 6, "text": " c", "source": "suffix"}, {"id": 8, "text": " d", "source": "target"},
    ],
    "passes": [
        {
            "tokens": [], "texts": [], "parents": [], "sources": [], "probabilities": [], "accepted": [], "committed": 1,
            "dropped": {"tokens": [], "texts": [], "parents": [], "sources": [], "probabilities": []},
            "pass_s": 0.02, "wait_s": 0.0, "requests": 1,
        },
        {
            **NODES, "accepted": [0, 1], "committed": 3, "pass_s": 0.03, "wait_s": 0.004, "requests": 2,
            "dropped": {
                "tokens": [9, 3], "texts": [" y", " z"], "parents": [2, 3], "sources": ["recycling", "recycling"],
                "probabilities": [0.02, 0.01],
            },
        },
    ],
    "metrics": {
        "queue_s": 0.0, "time_to_first_token_s": 0.02, "total_s": 0.06,
        "speculative_decoding": {
            "strategy": "blend", "num_spec_steps": 2, "switches": ["after 3 tokens without fspad"],
            "comparisons": [COMPARISON],
        },
    },
    "seconds": 0.06, "completion": 4,
}  # fmt: skip


def damaged(path: str, value: Any) -> dict[str, Any]:
    """The run with another value at a path such as "passes.1.parents.2"; ... leaves it out."""
    run = copy.deepcopy(RUN)
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place: Any = run
    for step in way:
        place = place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return run


def give(page: Any, content: str | bytes, name: str = "run.json") -> None:
    """Choose a file."""
    data = content.encode() if isinstance(content, str) else content
    page.set_input_files("#file", {"name": name, "mimeType": "application/json", "buffer": data})


@pytest.fixture(params=["file", "served"])
def page(request: pytest.FixtureRequest, open_page: Open) -> Any:
    """The page from a disk, without a server, and from one."""
    if request.param == "file":
        return open_page(PAGE.as_uri())
    service: HttpService = request.getfixturevalue("service")
    return open_page(service.url)


@pytest.mark.examples(2)
def test_a_saved_run_is_shown(page: Any) -> None:
    give(page, json.dumps(RUN))
    page.locator(".under").last.wait_for()
    assert answer_of(page) == RUN["text"] and page.locator(".user").inner_text() == "say it"
    assert [page.inner_text(f"#{name}") for name in ("tokens", "passes", "per-pass")] == ["4", "2", "2.00"]
    assert "seed 18446744073709551615" in page.inner_text(".under")
    page.locator("#slider").fill("1")
    assert kinds(page, "kept") == [5, 6, 8]
    assert page.locator("#tree g.dropped").count() == 1 and page.locator("#tree g.cut").count() == 2
    assert page.inner_text("#pass-times") == "30 ms, after 4.0 ms for drafts, shared by 2 requests"
    assert page.locator("#tree b").count() == 0
    assert "at most 3 passes · 50 ms, without fspad" in page.inner_text(
        "#comparisons"
    ) and "without fspad" in page.inner_text("#switches")


def test_a_run_that_was_saved_opens_as_it_was(open_page: Open, service: HttpService) -> None:
    page = open_page(service.url)
    ask(page, "one two one two one two one two", strategy="blend", effort="paper", temperature="0.7", seed="9")
    before = [
        answer_of(page),
        page.inner_text("#figures"),
        page.inner_text("#legend"),
        page.locator(".token.drafted").count(),
    ]
    run = saved(page)
    page.click("#new")
    give(page, json.dumps(run))
    page.locator(".under").last.wait_for()
    assert saved(page)["effort"] == run["effort"] == "paper"
    assert before == [
        answer_of(page), page.inner_text("#figures"), page.inner_text("#legend"), page.locator(".token.drafted").count()
    ]  # fmt: skip
    # And the conversation goes on from it.
    ask(page, "and", length="4")
    assert page.locator(".answer").count() == 2


@pytest.mark.exhaustive
def test_a_run_can_be_dropped_anywhere(open_page: Open) -> None:
    page = open_page(PAGE.as_uri())
    moved = page.evaluate_handle(
        """data => { const moved = new DataTransfer();
        moved.items.add(new File([atob(data)], "dropped.json", {type: "application/json"})); return moved; }""",
        base64.b64encode(json.dumps(RUN).encode()).decode(),
    )
    page.dispatch_event("#inspector", "dragover", {"dataTransfer": moved})
    assert page.locator("#drop").is_visible()
    page.dispatch_event("#inspector", "drop", {"dataTransfer": moved})
    page.locator(".under").last.wait_for()
    assert answer_of(page) == RUN["text"] and page.locator("#drop").is_hidden()


def traces(*lines: dict[str, Any]) -> str:
    """A bench's traces, with these entries beside the token ids."""
    return "\n".join(
        json.dumps({"task": "copy", "prompt_ids": [1, 2], "output_ids": [4, 5, 6, 8], **line}) for line in lines
    )


@pytest.mark.exhaustive
def test_the_traces_of_a_bench_are_shown_answer_by_answer(open_page: Open, tiny_model: Path, tmp_path: Path) -> None:
    """What the bench's own process records, written by its own writer, and opened where there is no server."""
    questions = {"copy/1": "one two three one two three one two", "talk/1": "hello <b>there</b>"}
    tokens = Tokens(str(tiny_model))
    requests = [
        Request(id=name, task=name[:4], prompt=tokens.encode(turn), seed=number, turn=turn)
        for number, (name, turn) in enumerate(questions.items())
    ]
    # Playwright holds this thread's event loop.
    with ThreadPoolExecutor(1) as thread:
        plain, recorded = thread.submit(record, tiny_model, tuple(requests)).result(120)
    file = tmp_path / TRACES
    write_traces(file, requests, dict(zip(questions, plain, strict=True)), dict(zip(questions, recorded, strict=True)))
    page = open_page(PAGE.as_uri())
    give(page, file.read_text(), TRACES)
    page.locator(".under").nth(1).wait_for()
    assert page.locator(".user").all_inner_texts() == list(questions.values())
    for number, (run, answer) in enumerate(zip(recorded, plain, strict=True)):
        assert [token["id"] for token in run["tokens"]] == list(answer)
        assert answer_of(page, number) == run["text"] == decoded(tokens, answer)
        page.locator(".under button").nth(number).click()
        assert page.inner_text("#tokens") == str(len(answer)) and page.inner_text("#passes") == str(len(run["passes"]))
        guessed = sum(token["source"] != "target" for token in run["tokens"])
        assert page.locator(".answer").nth(number).locator(".token.drafted").count() == guessed
    assert any(run["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for run in recorded)


def record(model: Path, requests: tuple[Request, ...]) -> tuple[list[tuple[int, ...]], list[dict[str, Any]]]:
    """Plain decoding's answers, and the runs of blend's."""
    load = order_of(LoadPoint(requests=requests, concurrency=1, max_tokens=64, temperature=0.0, tenant="recorded"))
    settings = {"verifier": {"max_model_len": 512, "kv_cache_tokens": 4096, "threads": 1, "budget": "fixed"}}
    peer = Peer({"settings": settings, "model": "tiny", "model_path": str(model)})
    try:
        plain = [tuple(answer["tokens"]) for answer in peer.run("autoregressive", load)["answers"]]
        return plain, [answer["run"] for answer in peer.run("blend", {**load, "record": True})["answers"]]
    finally:
        peer.close()


def decoded(tokens: Tokens, answer: tuple[int, ...]) -> str:
    detokenizer = tokens.detokenizer()
    return "".join(detokenizer.push(token) for token in answer) + detokenizer.flush()


@pytest.mark.exhaustive
def test_damaged_traces_are_refused_by_line_and_name(open_page: Open) -> None:
    page = open_page(PAGE.as_uri())
    cases = [
        (traces({"run": RUN}, {}), "line 2: run is missing: must be an object"),
        (traces({"run": damaged("passes.1.parents.2", 2)}), "line 1: passes[1].parents[2] is 2: must be -1, or an earlier node, at most 1"),
        (traces({"run": RUN}) + "\n5", "line 2: the line is 5: must be an object"),
        (traces({"run": RUN})[:-9], "line 1: it is no JSON"),
    ]  # fmt: skip
    for number, (content, says) in enumerate(cases):
        give(page, content, TRACES)
        said = page.locator(".card.failure").nth(number)
        assert said.inner_text().startswith(f"{TRACES} cannot be opened: {says}")
    assert page.locator(".answer").count() == 0


DAMAGE: list[tuple[str, Any, str]] = [
    ("format", "other", 'format is "other": must be "outrider-run", a saved run'),
    ("version", 2, "version is 2: must be 1"),
    ("model", ..., "model is missing: must be a text"),
    ("messages.0.content", 5, "messages[0].content is 5: must be a text"),
    ("tokens", {}, "tokens is {}: must be a list"),
    ("tokens.1.id", -1, "tokens[1].id is -1: must be a whole number from 0"),
    ("tokens.2.source", 7, "tokens[2].source is 7: must be a text"),
    ("text", "a b c", 'text is "a b c": must be the tokens\' texts, joined'),
    ("passes.1.parents.2", 2, "passes[1].parents[2] is 2: must be -1, or an earlier node, at most 1"),
    ("passes.1.parents.0", -2, "passes[1].parents[0] is -2: must be -1, or an earlier node, at most -1"),
    ("passes.1.texts", [" b"], "passes[1].texts is 1: must be 3 entries, as tokens has"),
    ("passes.1.accepted", [1], "passes[1].accepted[0] is 1: must be a child of the node before, -1"),
    ("passes.1.accepted.1", 9, "passes[1].accepted[1] is 9: must be a node, below 3"),
    ("passes.1.committed", 2, "passes is 3: must be passes that bring all 4 tokens"),
    ("passes.1.dropped.parents.1", 4, "passes[1].dropped.parents[1] is 4: must be -1, or an earlier node, at most 3"),
    ("passes.1.dropped", ..., "passes[1].dropped is missing: must be an object"),
    ("passes.0.pass_s", "fast", 'passes[0].pass_s is "fast": must be a number from 0'),
    ("metrics.total_s", None, "metrics.total_s is null: must be a number from 0"),
    ("metrics.speculative_decoding.switches", "x", 'metrics.speculative_decoding.switches is "x": must be a list'),
    (
        "metrics.speculative_decoding.comparisons.0.num_passes", 1.5,
        "metrics.speculative_decoding.comparisons[0].num_passes is 1.5: must be a whole number from 0",
    ),
    (
        "metrics.speculative_decoding.comparisons.0.exact", None,
        "metrics.speculative_decoding.comparisons[0].exact is null: must be true or false",
    ),
    ("seconds", ..., "seconds is missing: must be a number from 0"),
]  # fmt: skip


def test_a_damaged_run_is_refused_by_the_name_of_what_is_wrong(open_page: Open) -> None:
    page = open_page(PAGE.as_uri())
    for number, (path, value, says) in enumerate(DAMAGE):
        give(page, json.dumps(damaged(path, value)), f"damaged-{number}.json")
        said = page.locator(".card.failure").nth(number)
        assert said.inner_text() == f"damaged-{number}.json cannot be opened: {says}"
    assert page.locator(".answer").count() == 0


STRANGE: list[tuple[str | bytes, str]] = [
    ("", "it is no JSON"),
    ("{", "it is no JSON"),
    ("[]", "the file is []: must be an object"),
    ("null", "the file is null: must be an object"),
    (b"\xff\xfe\x00", "it is no JSON"),
]


@pytest.mark.exhaustive
def test_what_is_no_run_is_refused(open_page: Open) -> None:
    page = open_page(PAGE.as_uri())
    for number, (content, says) in enumerate(STRANGE):
        give(page, content, "strange.json")
        said = page.locator(".card.failure").nth(number)
        assert said.inner_text().startswith(f"strange.json cannot be opened: {says}")


@pytest.mark.exhaustive
def test_no_cut_of_a_saved_file_opens_or_breaks_the_page(open_page: Open) -> None:
    page = open_page(PAGE.as_uri())

    def refused(text: str) -> bool:
        """Whether the page refuses a file's text by name, which no failure of its own is."""
        return bool(
            page.evaluate(
                "text => { try { runsFrom(text); return false } catch (error) { return !(error instanceof TypeError) } }",
                text,
            )
        )

    text = json.dumps(RUN)
    assert not refused(text)
    assert all(refused(text[:length]) for length in range(0, len(text), 37))
    for path in ("messages", "tokens", "passes", "metrics", "passes.0", "tokens.0", "metrics.speculative_decoding"):
        for value in (0, "x", [0], {"a": 1}, True):
            assert refused(json.dumps(damaged(path, value))), (path, value)
