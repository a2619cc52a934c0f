"""The strategy ``auto`` on recorded answers and a simulated clock: hardly ever behind plain decoding, or the best source."""

from __future__ import annotations

import random
import statistics
from functools import cache

import pytest

from services.verifier.engine import repetition
from speculation.sources import AUTO
from tests.recorded_worlds import PROMPT, VOCAB, Machine, RecordedService, recordings
from tests.simulated import run

PLAIN = "autoregressive"
MACHINES = {
    "own cores": Machine(draft_s=0.001),
    "shared cores": Machine(draft_s=0.004, slower=0.2),
    "late drafts": Machine(row=0.05, draft_s=0.015, slower=0.1),
    "many rows for one": Machine(row=0.004, free_rows=8, draft_s=0.001),
}


@cache
def slowness(machine: str, strategy: str, rounds: int = 2) -> dict[str, list[float]]:
    """Seconds of answers one after the other, over those of as many passes with one row; by kind of text."""

    async def answers() -> dict[str, list[float]]:
        texts = [recordings(seed) for seed in range(rounds)]
        service = RecordedService(MACHINES[machine], [text for each in texts for text in each.values()])
        found: dict[str, list[float]] = {name: [] for name in texts[0]}
        await service.loop.start()
        for each in texts:
            for name, text in each.items():
                seconds = await service.seconds([text], strategy)
                found[name].append(seconds / ((len(text) - PROMPT) * MACHINES[machine].pass_s))
        await service.loop.stop()
        return found

    return run(answers())


@pytest.mark.parametrize("machine", ["shared cores", "late drafts"])
def test_regret_against_the_best_fixed_strategy_of_each_answer(machine: str) -> None:
    fixed = [slowness(machine, strategy) for strategy in (PLAIN, "prompt_lookup", "suffix", "recycling")]
    regrets = {
        name: [own / min(each[name][index] for each in fixed) - 1 for index, own in enumerate(found)]
        for name, found in slowness(machine, AUTO).items()
    }
    assert statistics.mean(regret for found in regrets.values() for regret in found) <= 0.05, regrets
    # Phrases in random order: nothing but the suffix source knows where they end.
    for name, found in regrets.items():
        assert max(found) <= (0.12 if name == "phrases" else 0.08), regrets


@pytest.mark.parametrize("machine", MACHINES)
def test_a_new_text_after_repeating_ones_takes_hardly_longer(machine: str) -> None:
    """What repeating texts have taught about drafts holds no longer; neither does what it taught about their cost."""
    more = [own / plain - 1 for own, plain in zip(*(slowness(machine, each)["new"] for each in (AUTO, PLAIN)), strict=True)]
    assert max(more) <= 0.04, more


@pytest.mark.parametrize("machine", MACHINES)
def test_an_answer_that_changes_its_style_twice(machine: str) -> None:
    own, plain = (statistics.mean(slowness(machine, each)["changes"]) for each in (AUTO, PLAIN))
    # Of 210 tokens, 90 repeat themselves.
    assert own <= 0.85 * plain


@pytest.mark.parametrize("machine", ["shared cores", "late drafts"])
def test_a_text_that_begins_to_repeat_itself_is_drafted_for_at_once(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long new text drafts are asked for seldom; repeated passages would be over before the next one."""
    numbers = random.Random(7)
    new, passage = ([numbers.randrange(VOCAB - 1) for _ in range(count)] for count in (PROMPT + 150, 25))
    text = [*new, *passage, *passage]

    async def seconds() -> float:
        service = RecordedService(MACHINES[machine], [text])
        await service.loop.start()
        found = [await service.seconds([text], AUTO) for _ in range(3)]
        await service.loop.stop()
        return statistics.mean(found)

    own = run(seconds())
    monkeypatch.setattr(repetition, "_STREAK", 1 << 30)
    saved_s = run(seconds()) - own
    assert saved_s >= 2 * MACHINES[machine].pass_s


@pytest.mark.parametrize("users", [1, 4, 16, 64])
@pytest.mark.parametrize("machine", ["shared cores", "own cores"])
def test_at_no_load_slower_than_plain_decoding(machine: str, users: int) -> None:
    texts = [recordings(seed)[name][:120] for seed in range(users) for name in ("changes" if seed % 2 else "new",)]

    async def seconds(strategy: str) -> list[float]:
        service = RecordedService(MACHINES[machine], texts)
        await service.loop.start()
        found = [await service.seconds(texts, strategy) for _ in range(2)]
        await service.loop.stop()
        return found

    (first, second), plain = run(seconds(AUTO)), statistics.mean(run(seconds(PLAIN)))
    assert first <= 1.04 * plain
    assert second <= 1.02 * plain
