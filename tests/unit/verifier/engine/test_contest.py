"""Drafting as a whole against plain decoding: whichever is faster goes on, and trials of the other cost next to nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from services.verifier.engine.deciding.contest import Contest


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What steps bring and take, by their number; times in expected plain steps.

    Attributes:
        requests: decoded at once.
        more: tokens that drafting brings for each other one; ``longer``: by what share its steps are longer.
        machine: how many times longer than expected a step takes at all.
        prompts: each such step has a prompt, which takes as long as two plain steps.
    """

    requests: int = 8
    more: Callable[[int], float] = lambda step: 0.1
    longer: Callable[[int], float] = lambda step: 0.1
    machine: Callable[[int], float] = lambda step: 1.0
    prompts: Callable[[int], bool] = lambda step: False


def played(world: World, steps: int = 3000, seed: int = 0) -> Iterator[tuple[float, float, bool]]:
    """For each step the work that it did, the time it took, and whether it drafted."""
    numbers, contest = random.Random(seed), Contest()
    for step in range(steps):
        drafts, prompt = contest.drafting, 2.0 if world.prompts(step) else 0.0
        tokens = world.requests
        if drafts:
            tokens += sum(numbers.random() < world.more(step) for _ in range(world.requests))
        took = (1.0 + prompt + (world.longer(step) if drafts else 0.0)) * world.machine(step) * numbers.gauss(1.0, 0.03)
        contest.learn(
            requests=world.requests, tokens=tokens, seconds=took, plain_s=1.0, prompt_s=prompt, busy=drafts, repeats=False
        )
        yield tokens / world.requests + prompt, took / world.machine(step), drafts


def speed(world: World, first: int = 0, last: int = 3000) -> float:
    """Work per time between two steps, over that of plain decoding."""
    found = list(played(world, last))[first:]
    return sum(work for work, _, _ in found) / sum(took for _, took, _ in found)


@pytest.mark.examples(5)
@pytest.mark.parametrize("requests", [5, 8, 24, 64])
@pytest.mark.parametrize("longer", [0.02, 0.12, 0.3, 1.0])
def test_drafting_that_does_not_pay_costs_next_to_nothing(longer: float, requests: int) -> None:
    assert speed(World(requests=requests, more=lambda _: 0.02, longer=lambda _: longer)) >= 0.985


@pytest.mark.parametrize("requests", [8, 24])
@pytest.mark.parametrize("longer", [0.04, 0.06])
def test_trials_of_a_way_that_is_nearly_as_fast_become_rare(longer: float, requests: int) -> None:
    """Each costs little; as often as the first ones they cost 1 % of a service's first minute."""
    world = World(requests=requests, more=lambda _: 0.02, longer=lambda _: longer + 0.02)
    found = [step for seed in range(5) for step in played(world, 500, seed)]
    assert sum(work for work, _, _ in found) / sum(took for _, took, _ in found) >= 0.992


@pytest.mark.examples(3)
@pytest.mark.parametrize("requests", [1, 4, 8, 24])
@pytest.mark.parametrize("more", [0.2, 0.6, 0.9])
def test_drafting_that_pays_goes_on(more: float, requests: int) -> None:
    best = (1.0 + more) / 1.1
    assert speed(World(requests=requests, more=lambda _: more)) >= 0.98 * best


@pytest.mark.parametrize("longer", [0.12, 0.3])
def test_steps_with_prompts_count(longer: float) -> None:
    """Where most steps have a prompt, drafting that makes these longer is noticed there."""
    assert speed(World(more=lambda _: 0.02, longer=lambda _: longer, prompts=lambda step: step % 3 > 0)) >= 0.985


def test_a_text_that_changes_is_noticed_in_both_directions() -> None:
    world = World(more=lambda step: 0.6 if 1000 <= step < 2000 else 0.0)
    found = [drafts for _, _, drafts in played(world)]
    assert sum(found[500:1000]) < 50
    # The next trial finds it.
    assert sum(found[1400:2000]) > 550
    assert sum(found[2100:]) < 100


@pytest.mark.parametrize("longer", [0.0, 0.3])
def test_a_machine_that_is_twice_as_slow_for_a_while_changes_nothing_for_long(longer: float) -> None:
    """The expected times follow the machine within some steps; here they never do, which is worse."""
    world = World(more=lambda _: 0.2, longer=lambda _: longer, machine=lambda step: 2.0 if 1000 <= step < 1500 else 1.0)
    assert speed(world, 900, 2000) >= 0.97 * max(1.0, 1.2 / (1.0 + longer))


def bursts(seed: int, steps: int = 3000) -> Callable[[int], float]:
    """How much longer each step takes beside other work that comes and goes: half as long or more is usual."""
    numbers, level, found = random.Random(seed), 0.0, []
    for _ in range(steps):
        level = 0.8 * level + 0.6 * numbers.gauss(0.0, 1.0)
        found.append(math.exp(0.4 * level))
    return found.__getitem__


@pytest.mark.examples(3)
@pytest.mark.parametrize("requests", [8, 16])
@pytest.mark.parametrize(("more", "least"), [(0.0, 0.97), (0.1, 0.97), (0.5, 1.15)])
def test_beside_other_work_drafting_must_win_by_more_than_the_noise(more: float, least: float, requests: int) -> None:
    """Drafting's steps are a fifth longer: it is a sixth slower, a twelfth slower, or a quarter faster."""
    found = [
        speed(World(requests=requests, more=lambda _: more, longer=lambda _: 0.2, machine=bursts(seed))) for seed in range(5)
    ]
    assert sum(found) / len(found) >= least


@pytest.mark.parametrize("at_once", [1000.0, 1e-9, -5.0])
def test_a_clock_that_jumps_is_hardly_believed(at_once: float) -> None:
    world = World(more=lambda _: 0.6, machine=lambda step: at_once if step == 1000 else 1.0)
    found = list(played(world))
    assert sum(drafts for _, _, drafts in found[1001:1200]) > 150


def test_a_drafter_that_is_quick_at_first_and_slow_later_ends_in_plain_decoding() -> None:
    world = World(more=lambda _: 0.3, longer=lambda step: 0.05 if step < 500 else 1.5)
    assert speed(world, 600) >= 0.98


def steps_until(contest: Contest, drafting: bool) -> int:
    """Steps of the ordinary world, in which drafting does not pay, until the contest has gone the other way."""
    for step in range(100):
        if contest.drafting == drafting:
            return step
        tokens, seconds = (8.8, 1.3) if contest.drafting else (8.0, 1.0)
        contest.learn(requests=8, tokens=tokens, seconds=seconds, plain_s=1.0, busy=contest.drafting)
    return 100


def kept_after(steps: int) -> dict[str, Any]:
    """What is kept of a contest in which drafting does not pay, as it is read from a file."""
    contest = Contest()
    for _ in range(steps):
        tokens, seconds = (8.8, 1.3) if contest.drafting else (8.0, 1.0)
        contest.learn(requests=8, tokens=tokens, seconds=seconds, plain_s=1.0, busy=contest.drafting)
    kept: dict[str, Any] = json.loads(json.dumps(contest.as_object()))
    return kept


def test_the_next_start_begins_with_what_is_known() -> None:
    assert steps_until(Contest(), drafting=False) > 3
    again = Contest.from_object(kept_after(500))
    assert not again.drafting
    # It counts less than what is seen.
    assert 1.1 / 1.3 < again.gain(8) < 0.95
    assert again.learnt and not Contest().learnt


@pytest.mark.parametrize("steps", [40, 70, 80, 500])
def test_a_trial_is_not_what_is_kept(steps: int) -> None:
    """Whatever is under way when the service stops."""
    assert not kept_after(steps)["drafting"]


def test_what_is_known_is_soon_found_wrong_where_texts_are_others() -> None:
    """It costs what a change of texts costs while serving."""
    contest = Contest.from_object(kept_after(2000))
    took = work = 0.0
    for _ in range(1500):
        tokens, seconds = (13.0, 1.1) if contest.drafting else (8.0, 1.0)
        took, work = took + seconds, work + tokens / 8
        contest.learn(requests=8, tokens=tokens, seconds=seconds, plain_s=1.0, busy=contest.drafting)
    assert contest.drafting
    assert work / took >= 0.75 * (13 / 8 / 1.1)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"drafting": True},
        {"drafting": True, "rates": [[0, 6, 0, 1.0]]},
        {"drafting": True, "rates": [[0, 6, 0, -1.0, 1.0]]},
        {"drafting": True, "rates": [[0, 6, 0, 1.0, 0.0]]},
        {"drafting": True, "rates": [[0, 6, 0, math.nan, 1.0]]},
        {"drafting": True, "rates": [[0, 6, 0, math.inf, 1.0]]},
        {"drafting": True, "rates": [[0, 10**9, 0, 1.0, 1.0]]},
        {"drafting": True, "rates": [["quiet", "6", 0, "much", 1.0]]},
        {"drafting": True, "rates": 7},
    ],
)
def test_damaged_content_is_refused(content: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Contest.from_object(content)
