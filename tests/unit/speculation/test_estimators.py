"""The estimators: their examples, what they promise, and the page that explains what is decided by them."""

from __future__ import annotations

import doctest
import random
from pathlib import Path

import pytest

from services.verifier.engine import mailbox
from services.verifier.engine.deciding import asking, cost_slope, costly_sources, source_use, stream_ends, waiting
from speculation import acceptance_rates, budget, costs, estimators
from speculation.estimators import DecayingMean, Ratio, RecentTimes, Slope


def test_their_examples_are_true() -> None:
    found = doctest.testmod(estimators)
    assert found.attempted >= 10
    assert found.failed == 0


def test_the_numbers_of_the_page_on_decisions_are_true() -> None:
    found = doctest.testfile(str(Path(__file__).parents[3] / "docs" / "decisions.md"), module_relative=False)
    assert found.attempted >= 20
    assert found.failed == 0


@pytest.mark.parametrize(
    "words",
    [
        f"| {1 / waiting._WORTH_WEIGHT:g} drafts |",
        f"| {waiting._REMEMBERED} drafts |",
        f"{asking._ASSUMED:g} of a pass; 0 for up to {asking._FEW} requests",
        f"{cost_slope._MEMORY:g}, {1 / cost_slope._MEAN_WEIGHT:g} passes | see above, as {cost_slope._PRIOR:g} pass |",
        f"| {source_use._MEMORY:g} tokens | all requests' share, as {source_use._PRIOR:g} tokens |",
        f"| {acceptance_rates._MEMORY:g} nodes | the source's claim, as {acceptance_rates._PRIOR:g} nodes |",
        f"| {1 / costs._SPEED_WEIGHT:g}, {1 / costs._SHAPE_WEIGHT:g} passes |",
        f"| {1 / budget._PROMPT_WEIGHT:g} passes |",
        f"within the allowed {100 * asking._SHARE:g} %",
        f"After {budget._EXPLORE_EVERY - 1} steps without a node",
        f"After {waiting._TRY_EVERY} steps without a wait",
        f"up to {waiting._TRY_AT_LEAST_EVERY}",
        f"up to {asking.MOST_STEPS} steps",
        f"{100 * costly_sources._LEAST_GAIN - 100:.0f} % faster",
        f"after {costly_sources._TRY_EVERY} requests, then {2 * costly_sources._TRY_EVERY}",
        f"up to {costly_sources._TRY_AT_LEAST_EVERY}",
        f"After {stream_ends.EXPLORE_EVERY} steps without streams",
        f"After {waiting._WASTED} wasted waits",
        f"lost after {mailbox._LOST_S:g} s",
        f"earns {100 * waiting._SHARE:g} % of all pass time",
    ],
)
def test_the_page_on_decisions_names_the_present_constants(words: str) -> None:
    assert words in (Path(__file__).parents[3] / "docs" / "decisions.md").read_text()


def test_a_mean_is_plain_until_it_has_a_memory_and_then_follows() -> None:
    mean = DecayingMean(0.0, newest=0.1, prior=0.0)
    for value in (1.0, 2.0, 6.0):
        mean.add(value)
    assert mean.value == pytest.approx(3.0)
    for _ in range(100):
        mean.add(5.0)
    assert mean.value == pytest.approx(5.0, abs=1e-3)
    assert (mean.successor().value, mean.successor().count) == (mean.value, 0)
    one, other = DecayingMean(1.0, newest=0.3, prior=2.0), DecayingMean(1.0, newest=0.3, prior=2.0)
    for value in (3.0, -4.0, 0.5, 9.0):
        one.add(value)
        other.include(value)
        assert (one.value, one.count) == (other.value, other.count)


def test_a_value_far_off_counts_as_less_far() -> None:
    mean = DecayingMean(1.0, newest=0.5)
    assert mean.add(100.0, most=2.0) == 2.0
    assert mean.value == 2.0
    assert mean.add(-100.0, most=3.0) == -3.0
    assert mean.value == 0.5


def test_a_ratio_is_what_is_assumed_until_it_knows_better_and_forgets() -> None:
    ratio = Ratio()
    assert (ratio.of(), ratio.of(0.3), ratio.of(0.3, 5.0)) == (0.0, 0.3, 0.3)
    for part in (0.0, 1.0):
        for _ in range(1000):
            ratio.add(part, 1.0)
            ratio.fade(50.0)
    assert ratio.whole == pytest.approx(50.0)
    assert ratio.of(0.0, 8.0) == pytest.approx(50 / 58)


def test_pairs_that_tell_nothing_displace_nothing() -> None:
    slope, numbers = Slope(), random.Random(1)
    for _ in range(200):
        x = numbers.choice((-0.5, 0.5))
        slope.learn(x, 3.0 * x + numbers.gauss(0, 0.1), memory=40.0)
    known = slope.of()
    assert known == pytest.approx(3.0, abs=0.1)
    for _ in range(1000):
        slope.learn(0.0, 7.0, memory=40.0)
    assert slope.of() == known


def test_only_the_latest_times_count() -> None:
    times = RecentTimes(3)
    assert (len(times), times.longest, times.longer_than(0.0)) == (0, 0.0, [])
    for took in (9.0, 1.0, 2.0, 6.0):
        times.add(took)
    assert (len(times), times.mean, times.median, times.longest) == (3, 3.0, 2.0, 6.0)
    assert times.longer_than(2.0) == [6.0]
    assert times.longer_than(2.0, slack_s=0.5) == [2.5, 6.5]
