"""What ``outrider bench never-slower`` asks: kinds, fresh prompts, requests, the grid; and the file it goes on with."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bench.prompts import read_prompts
from benchmarks.bench.records import Prompt
from benchmarks.never_slower.builtin_prompts import builtin_prompt
from benchmarks.never_slower.cells import LONG, PLAIN, SHORT, GridCell, LoadTurn, grid
from benchmarks.never_slower.kinds import CHANGING, MIXED, PLAIN_KINDS, KindOrder, PromptPool, kind_of
from benchmarks.never_slower.load import LoadAnswer, LoadRecord
from benchmarks.never_slower.record_file import FORMAT, KIND, check_same, read_record, turns_of, write_record
from benchmarks.never_slower.requests import LoadRequest, RequestLimits, RoundRequests
from benchmarks.never_slower.same_answers import differences_from, longest_answers, unanswered
from benchmarks.never_slower.same_work import common_tokens, request_seconds, shared_tenths
from benchmarks.never_slower.turns import RoundPlan
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError
from tests.tiny_models.tiny import make_tiny_tokenizer

CELL = GridCell(on="process", at_once=2, kind="open", temperature=0.0, length=SHORT)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(folder)
    return Tokens(str(folder))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_builtin_prompts_are_fresh_and_always_the_same(kind: str) -> None:
    texts = [builtin_prompt(kind, number) for number in range(70000, 70600)]
    assert len(set(texts)) == len(texts)
    assert texts[:3] == [builtin_prompt(kind, number) for number in range(70000, 70003)]


def test_edits_hold_what_is_to_be_edited() -> None:
    text = builtin_prompt("edits", 3)
    old = text.split("Rename `")[1].split("`")[0]
    assert text.count(f"self.{old}") >= 3


def test_every_task_of_the_builtin_bench_file_has_a_kind() -> None:
    tasks = Counter(kind_of(prompt.task) for prompt in read_prompts("builtin"))
    assert set(tasks) == {"open", "edits", "summaries", "translation", "json"}
    assert kind_of("humaneval") == "code"
    assert kind_of("translation") == "translation"


def test_a_files_prompts_come_first_each_once_and_then_builtin_ones() -> None:
    pool = PromptPool([Prompt(id=str(n), task="qa", turns=(f"Question {n}?", "And then?")) for n in range(5)])
    names = [pool.prompt("open", 7, number).name for number in range(9)]
    assert names[:5] == ["qa/2", "qa/3", "qa/4", "qa/0", "qa/1"]
    assert names[5:] == [f"builtin/open/{n}" for n in range(12, 16)]
    assert pool.prompt("json", 7, 0).name == "builtin/json/7"
    assert pool.counts() == {**dict.fromkeys(PLAIN_KINDS, 0), "open": 5}


def test_mixed_goes_through_all_kinds_and_changing_stays_with_one_for_a_time() -> None:
    mixed = KindOrder(MIXED, 30.0)
    assert [mixed.take(0.0) for _ in range(7)] == [*((kind, 0) for kind in PLAIN_KINDS), (PLAIN_KINDS[0], 1)]
    changing = KindOrder(CHANGING, 30.0, first=5)
    taken = [changing.take(elapsed) for elapsed in (0.0, 29.9, 30.0, 65.0)]
    assert taken == [("json", 0), ("json", 1), ("open", 0), ("edits", 0)]


def test_all_contestants_of_a_round_get_the_same_requests(tokens: Tokens) -> None:
    limits = RequestLimits(max_tokens=40, max_model_len=2048)
    requests = RoundRequests(PromptPool(), tokens, limits, CELL, 11)
    requests.prepare(3)
    first, second = requests.supply(30.0), requests.supply(30.0)
    ours, theirs = [first(0.0) for _ in range(9)], [second(0.0) for _ in range(9)]
    assert ours == theirs
    assert len({request.token_ids for request in ours}) == len({request.seed for request in ours}) == 9
    # Answers do not all end at once.
    assert len({request.max_tokens for request in ours}) > 4
    assert all(20 <= request.max_tokens <= 40 for request in ours)
    other = RoundRequests(PromptPool(), tokens, limits, CELL, 50).supply(30.0)
    assert not {request.name for request in ours} & {other(0.0).name for _ in range(9)}


def test_long_prompts_are_about_as_long_as_they_should_be(tokens: Tokens) -> None:
    limits = RequestLimits(max_tokens=40, max_model_len=2048, long_tokens=1500)
    supply = RoundRequests(PromptPool(), tokens, limits, replace(CELL, length=LONG), 11).supply(30.0)
    several = [supply(0.0).token_ids for _ in range(3)]
    assert all(1300 <= len(ids) <= 1600 for ids in several)
    # Nothing but the template and the first word is shared: no prefix is computed once for all.
    assert len({ids[:40] for ids in several}) == 3


def test_prompts_that_do_not_fit_are_left_out_or_refused(tokens: Tokens) -> None:
    limits = RequestLimits(max_tokens=40, max_model_len=200)
    pool = PromptPool([Prompt(id="long", task="qa", turns=("Why? " * 99,)), Prompt(id="short", task="qa", turns=("Why?",))])
    assert RoundRequests(pool, tokens, limits, CELL, 0).supply(30.0)(0.0).name == "qa/short"
    with pytest.raises(ConfigurationError, match="edits and --max-tokens 40 exceed 200"):
        RoundRequests(pool, tokens, limits, replace(CELL, kind="edits"), 0).supply(30.0)(0.0)


def test_the_grid_names_what_does_not_exist() -> None:
    cells = grid((1, 8, 8), ("open", "changing"), (0.0, 1.0), ("short",), ("process", "ray"))
    assert len(cells) == len(set(cells)) == 16
    assert [cell.on for cell in cells] == ["process"] * 8 + ["ray"] * 8
    with pytest.raises(ConfigurationError, match="--kinds: there is no poems; there are open,"):
        grid((1,), ("poems",), (0.0,), ("short",), ("process",))


def test_plain_decoding_comes_first_and_last_and_strategies_change_places() -> None:
    plan = RoundPlan(strategies=("auto", "blend"), seconds=6.0)
    assert plan.contestants == (PLAIN, "auto", "blend", PLAIN)
    assert plan.order(0) == (0, 1, 2, 3)
    assert plan.order(1) == (0, 2, 1, 3)
    assert plan.seconds_of(CELL) == 6
    assert plan.seconds_of(replace(CELL, kind=CHANGING)) == 90


def answer(tokens: list[int], *, finished: bool = False, name: str = "a", max_tokens: int = 9) -> LoadAnswer:
    request = LoadRequest(name=name, token_ids=(1,), seed=5, max_tokens=max_tokens)
    return LoadAnswer(request=request, tokens=tokens, finished=finished)


@pytest.mark.parametrize(
    ("ours", "plain", "said"),
    [
        (answer([1, 2]), answer([1, 2, 3]), ""),
        (answer([1, 2, 3], finished=True), answer([1, 2, 3], finished=True), ""),
        (answer([1, 2]), answer([1, 2], finished=True), ""),
        (answer([1, 4, 3]), answer([1, 2, 3]), "a, seed 5, token 1: 4 instead of 2"),
        (answer([1, 2], finished=True), answer([1, 2, 3]), "a, seed 5, token 2: none instead of 3"),
        (answer([1, 2, 3]), answer([1, 2], finished=True), "a, seed 5, token 2: 3 instead of none"),
    ],
)
def test_answers_are_compared_as_far_as_they_came(ours: LoadAnswer, plain: LoadAnswer, said: str) -> None:
    assert differences_from({"a": plain}, [ours]) == ([said] if said else [])


def test_plain_decoding_is_asked_for_what_only_others_have_answered() -> None:
    reference = longest_answers([answer([1]), answer([1, 2]), answer([7], finished=True, name="b")])
    assert len(reference["a"].tokens) == 2
    ours = [
        answer([1, 2, 3]), answer([1, 2]), answer([7, 8], name="b"), answer([4, 5], name="c", finished=True),
        answer([], name="d"),
    ]  # fmt: skip
    missing = {request.name: request.max_tokens for request in unanswered(ours, reference)}
    # A whole answer is asked for whole: it may have ended too early.
    assert missing == {"a": 3, "c": 9}


def timed(name: str, sent_s: float, *arrivals: tuple[float, int]) -> LoadAnswer:
    request = LoadRequest(name=name, token_ids=(1,), seed=5, max_tokens=9)
    count = arrivals[-1][1] if arrivals else 0
    return LoadAnswer(request=request, tokens=[1] * count, sent_s=sent_s, arrivals=list(arrivals))


def loaded(*answers: LoadAnswer) -> LoadRecord:
    return LoadRecord(at_once=1, began_s=10.0, seconds=3.0, tenths=(1,) * 30, answers=answers)


def test_turns_are_compared_by_the_tokens_that_both_have() -> None:
    plain = loaded(timed("a", 9.0, (1.0, 1), (1.4, 2), (1.8, 3)), timed("b", 10.8, (0.5, 1), (1.0, 2)))
    fast = loaded(timed("a", 9.0, (1.0, 2), (1.2, 3)), timed("b", 10.2, (0.5, 2), (0.7, 4)), timed("long", 10.9))
    tokens = common_tokens([fast, plain])
    assert tokens == {"a": 3, "b": 2}
    # The first request counts from its first token, the next one from when it was sent.
    assert request_seconds(plain, tokens) == pytest.approx(0.8 + 1.0)
    assert request_seconds(fast, tokens) == pytest.approx(0.2 + 0.5)
    # The long prompt that only the faster one reached is not held against it.
    assert shared_tenths(fast, [plain]) == 9
    assert shared_tenths(plain, [plain]) == 30
    assert common_tokens([loaded(), plain]) == {}


def test_a_record_is_read_as_it_was_written_and_not_mixed_with_another(tmp_path: Path) -> None:
    turn = LoadTurn(
        cell=CELL,
        repeat=0,
        turn=1,
        strategy="auto",
        seconds=0.2,
        tenths=(3, 4),
        shared=2,
        work_s=0.3,
        plain_work_s=0.4,
        ttft_s=0.1,
        answers=2,
        wrong=("x",),
    )
    record = {
        "kind": KIND, "format": FORMAT, "turns": [turn.as_object()], "environment": {"commit": "a", "cores": 2},
        "settings": {"seconds": 6.0, "repeats": 1},
    }  # fmt: skip
    write_record(tmp_path, record)
    found = read_record(tmp_path)
    assert turns_of(found) == [turn]
    assert turn.speed == pytest.approx(35)
    check_same(found, {**record, "settings": {"seconds": 6.0, "repeats": 3}})
    with pytest.raises(ConfigurationError, match=r"seconds was 6.0 and is 8.0; commit was a and is b"):
        check_same(found, {**record, "settings": {"seconds": 8.0}, "environment": {"commit": "b", "cores": 2}})
    # As older versions have written them.
    router = {"acceptance": "walk", "learning_redis_url": "redis://a:secret@b", "learning_redis_password": "secret"}
    older = {**record, "settings": {"seconds": 6.0, "served": {"router": router}}}
    check_same(older, {**record, "settings": {"seconds": 6.0, "served": {"router": {"acceptance": "walk"}}}})
    with pytest.raises(ConfigurationError, match=r"kind: served.router.acceptance was walk and is rejection$"):
        check_same(older, {**record, "settings": {"seconds": 6.0, "served": {"router": {"acceptance": "rejection"}}}})
    with pytest.raises(ConfigurationError, match="damaged"):
        turns_of({"turns": [{"cell": {}}]})
    (tmp_path / "results.json").write_text('{"format": 2}')
    with pytest.raises(ConfigurationError, match="not a result of this version"):
        read_record(tmp_path)
