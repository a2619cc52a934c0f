"""The benchmark of regret: recordings on a simulated machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab.regret.days import MIXED, day, day_table
from lab.regret.recorded_answers import read_answers, write_answers
from lab.regret.recorded_target import LikeliestElsewhere, RecordedTarget
from lab.regret.report import PLAIN, Regrets, compare, load_table, over_plain_at, regret_table
from lab.regret.simulated_clock import run
from lab.regret.simulated_service import Machine, SimulatedService
from services.verifier.model.target_port import NOT_CHOSEN, Outcome, Prefix, Rows, Sampling
from speculation.errors import ConfigurationError, Internal
from speculation.sources import AUTO
from speculation.types import SamplingParams
from tests.engine.recorded_worlds import VOCAB, likeliest, recordings
from tests.running.refusals import refuses

pytestmark = pytest.mark.exhaustive

ANSWERS = [replace(each, output_ids=each.output_ids[:60], top_ids=each.top_ids[:60]) for each in recordings(0).values()]


def test_answers_survive_a_file_and_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    write_answers(file, ANSWERS)
    assert read_answers(file) == ANSWERS
    first = json.loads(file.read_text().splitlines()[0])
    for wrong in ({**first, "output_ids": first["output_ids"][1:]}, {**first, "prompt_ids": []}, {"task": "x"}, []):
        file.write_text(json.dumps(first) + "\n" + json.dumps(wrong))
        with refuses(ConfigurationError, field="answers.jsonl:2"):
            read_answers(file)
    file.write_text("")
    with refuses(ConfigurationError, field="answers.jsonl"):
        read_answers(file)


def opened(elsewhere: LikeliestElsewhere) -> RecordedTarget:
    target = RecordedTarget(ANSWERS, elsewhere, vocab_size=VOCAB)
    sampling = Sampling(params=SamplingParams(), prompt_length=len(ANSWERS[0].prompt_ids))
    assert target.open("s", 100, Prefix(tokens=ANSWERS[0].prompt_ids), sampling=sampling)
    return target


def test_a_target_says_the_recording_and_below_other_drafts_nothing() -> None:
    said, elsewhere = ANSWERS[0], LikeliestElsewhere(ANSWERS)
    target, other = opened(elsewhere), (said.output_ids[3] + 1) % VOCAB
    # After three tokens of the answer: its next one, then another; and one that it does not say.
    rows = Rows(
        request_id="s",
        context=len(said.prompt_ids) + 2,
        tokens=(*said.output_ids[2:5], other),
        parents=(-1, 0, -1),
        logits=4,
        top_k=4,
    )
    target.begin([rows])
    (outcome,) = target.finish()
    assert outcome.choices == (*said.output_ids[3:6], NOT_CHOSEN)
    assert outcome.top_ids[:3] == tuple(each[:4] for each in said.top_ids[3:6])
    assert outcome.top_ids[3] == elsewhere((said.output_ids[2], other))[:4]


def test_elsewhere_the_same_two_tokens_decide_then_the_last_one() -> None:
    elsewhere, said = LikeliestElsewhere(ANSWERS[:1]), ANSWERS[0]
    assert elsewhere((*said.output_ids[7:9],)) == said.top_ids[9]
    assert elsewhere((VOCAB + 1, said.output_ids[-2])) == said.top_ids[-1]
    assert elsewhere((VOCAB + 1, VOCAB + 2)) == said.top_ids[-1]


def test_every_strategy_is_held_against_auto_and_no_answer_changes() -> None:
    machine = Machine(row=0.05)
    found = compare(machine, ANSWERS, (PLAIN, "suffix"))
    assert set(found.slowness) == {PLAIN, "suffix", AUTO}
    assert found.slowness[PLAIN] == pytest.approx([1.0] * 4, abs=0.06)
    best = [min(several) for several in zip(found.slowness[PLAIN], found.slowness["suffix"], strict=True)]
    assert [own / other - 1 for own, other in zip(found.slowness[AUTO], best, strict=True)] == pytest.approx(found.each())
    # One strategy for all is the best of each for one answer alone, and no better for several.
    assert [found.against_one([number]) for number in range(4)] == pytest.approx(found.each())
    assert found.against_one() < max(found.each())
    # The second one repeats itself.
    assert found.over_plain()[1] < 0.8
    rows = regret_table({"small": found}).rows
    assert [row[1] for row in rows] == ["all", "new", "repeats", "changes", "phrases"]
    loads = {("small", users): over_plain_at(machine, ANSWERS, users, rounds=1) for users in (1, 4)}
    assert all(0.3 < each < 1.05 for ratios in loads.values() for both in ratios for each in both)
    # Of one answer, the mean is the last one.
    assert loads["small", 1][0][0] == loads["small", 1][0][1] != loads["small", 4][0][0] != loads["small", 4][0][1]
    table = load_table(loads)
    assert [row[:2] for row in table.rows] == [("small", "1"), ("small", "4")]
    assert table.columns[2:] == ("round 1: mean", "round 1: last")


def test_a_changed_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    said = RecordedTarget._outcome

    def wrong(self: RecordedTarget, rows: Rows) -> Outcome:
        outcome = said(self, rows)
        return replace(outcome, choices=tuple(7 for _ in outcome.choices))

    async def answer() -> None:
        service = SimulatedService(Machine(), ANSWERS, vocab_size=VOCAB, elsewhere=likeliest)
        await service.loop.start()
        try:
            await service.seconds(ANSWERS[:1], PLAIN)
        finally:
            await service.loop.stop()

    run(answer())
    monkeypatch.setattr(RecordedTarget, "_outcome", wrong)
    with pytest.raises(Internal, match="recorded answer"):
        run(answer())


def test_a_day_of_a_router_that_learns() -> None:
    copies = [replace(each, task="copies", prompt_ids=each.prompt_ids * 9) for each in ANSWERS]
    tales = [replace(each, task="tales", prompt_ids=tuple(range(600))) for each in ANSWERS]
    many = len(ANSWERS)
    found = Regrets(
        answers=[*copies, *tales],
        slowness={PLAIN: [1.0] * 2 * many, "suffix": [0.5] * many + [1.1] * many, AUTO: [0.8] * many + [0.7] * many},
    )
    told = day(found, 600, replayed=0.2)
    assert told["copies"].best == "suffix" and told["copies"].over("suffix") < 0.06
    assert told["copies"].over(AUTO) < -0.3 and told["tales"].left == 0
    # For who asks for both, no one strategy is as good as what suits each.
    assert told[MIXED].over(told[MIXED].best) < 0
    assert len(day_table({"here": told}).rows) == 4
