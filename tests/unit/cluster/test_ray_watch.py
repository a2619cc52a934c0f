"""When Ray counts as dead."""

from __future__ import annotations

import psutil

from cluster.ray.watch import Vitals


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_has_died_is_named_at_once() -> None:
    assert Vitals(10).death({"raylet": "sleeping", "GCS": "running"}, True) is None
    for gone in (None, psutil.STATUS_ZOMBIE):
        assert Vitals(10).death({"raylet": gone, "GCS": "running"}, True) == "its raylet has died"


def test_what_hangs_gets_some_patience() -> None:
    clock = Clock()
    vitals = Vitals(10, clock)
    assert vitals.death({"raylet": psutil.STATUS_STOPPED}, True) is None
    clock.now += 9
    assert vitals.death({"raylet": psutil.STATUS_STOPPED}, True) is None
    # It goes on, and hangs again: the time counts anew.
    assert vitals.death({"raylet": "sleeping"}, True) is None
    clock.now += 9
    assert vitals.death({"raylet": psutil.STATUS_STOPPED}, False) is None
    clock.now += 2
    assert vitals.death({"raylet": psutil.STATUS_STOPPED}, True) == "its raylet has been stopped for 10 s"


def test_a_ray_elsewhere_that_does_not_answer() -> None:
    clock = Clock()
    vitals = Vitals(60, clock)
    assert vitals.death({}, True) is None
    clock.now += 59
    assert vitals.death({}, False) is None
    clock.now += 1
    assert vitals.death({}, False) == "it has not answered for 60 s"
