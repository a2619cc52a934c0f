"""Which replica gets a request, which server a caller, and how many replicas there should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from cluster.ray import scaling
from cluster.ray.peers import Peers, by_turns
from cluster.settings import config
from cluster.verifiers.choice import choices, next_first, session_of, within_bounds
from speculation.errors import ConfigurationError, Unavailable
from tests.running.refusals import refuses


def test_prompts_that_begin_alike_belong_together() -> None:
    beginning = tuple(range(200))
    assert session_of("a", beginning) == session_of("a", (*beginning, 7, 8))
    assert session_of("a", beginning) != session_of("b", beginning)
    assert session_of("a", (1, 2, 3)) != session_of("a", (1, 2, 4))
    assert session_of(None, (1, 2)) == session_of("", (1, 2))


def test_a_further_attempt_goes_to_the_next_one() -> None:
    ring = ["first", "second", "third"]
    assert [next_first(ring, session_of("a", (1,), attempt))[0] for attempt in range(4)] == [*ring, "first"]


@pytest.mark.parametrize(
    ("loads", "order"),
    [
        # Nobody has anything to do: the preferred one.
        ([0, 0, 0], [0, 1, 2]),
        ([1, 0, 0], [1, 2, 0]),
        # Even load: the preferred one again.
        ([9, 9, 9], [0, 1, 2]),
        # The preferred one has more than a quarter above the average: the next one in the ring.
        ([10, 7, 4], [1, 2, 0]),
        ([30, 30, 10], [2, 0, 1]),
        ([5], [0]),
    ],
)
def test_the_preferred_verifier_unless_it_has_too_much_to_do(loads: list[int], order: list[int]) -> None:
    assert within_bounds(loads) == order


def test_a_verifier_that_refuses_everything_and_looks_idle_does_not_get_every_attempt() -> None:
    loads = {"hangs": 0, "works": 9}
    for ring in (["hangs", "works"], ["works", "hangs"]):
        sessions = [session_of("a", (1,), attempt) for attempt in range(4)]
        assert choices(ring, sessions[0], loads.__getitem__)[0] == "hangs"
        assert {choices(ring, session, loads.__getitem__)[0] for session in sessions[1:3]} == {"hangs", "works"}


def test_callers_take_servers_in_turns() -> None:
    servers = {0: "a", 1: "b", 2: "c"}
    assert [by_turns(servers, rank) for rank in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    # One of rank 1 has died: whoever called it goes on to the next.
    assert by_turns({0: "a", 2: "c"}, 1)[0] == "c"


class Replicas:
    def __init__(self) -> None:
        self.addresses: dict[int, str] = {0: "a", 1: "b"}
        self.hang = False
        self.now = 0.0

    async def ask(self) -> Mapping[int, str]:
        if self.hang:
            raise TimeoutError
        return dict(self.addresses)

    def peers(self, rank: int = 0) -> Peers:
        return Peers(self.ask, lambda: rank, lambda: self.now)


async def test_the_next_server_on_failure_and_the_best_one_again_later() -> None:
    replicas = Replicas()
    peers = replicas.peers()
    # Asked for again so soon: the first one has failed, then the second one as well.
    assert [await peers.address() for _ in range(3)] == ["a", "b", "a"]
    replicas.now += 60
    assert await peers.address() == "a"


async def test_a_server_that_hangs_does_not_hide_the_others() -> None:
    replicas = Replicas()
    peers = replicas.peers()
    assert await peers.address() == "a"
    replicas.hang = True
    assert await peers.address() == "b"
    with pytest.raises(Unavailable):
        await replicas.peers().address()


def load(rows: float, cache: float = 0.0, waiting: float = 0.0) -> Mapping[str, list[float]]:
    return {"rows": [rows], "cache": [cache], "waiting": [waiting]}


def test_verifiers_by_rows_cache_and_queue() -> None:
    # Fuller than 0.4 of the slots or 0.6 of the pool, or a queue: more.
    assert scaling.verifiers(load(0.5), 1, 1) == pytest.approx(0.5 / 0.4)
    assert scaling.verifiers(load(0.1, cache=0.9), 1, 1) == pytest.approx(0.9 / 0.6)
    assert scaling.verifiers({"rows": [0.3, 0.3], "cache": [0.1, 0.1], "waiting": [0, 5]}, 2, 2) == 3.0
    # A queue that was there for a tenth of the time says nothing, and one on its way is waited for.
    assert scaling.verifiers(load(0.3, waiting=0.1), 1, 1) == 1.0
    assert scaling.verifiers(load(1.0, waiting=9), 1, 3) == 3.0


def test_the_number_of_verifiers_does_not_swing() -> None:
    # Two share 0.7: neither is fuller than 0.4, and one alone would be.
    assert scaling.verifiers(load(0.7), 2, 2) == 2.0
    assert scaling.verifiers(load(0.3), 2, 2) == pytest.approx(1.2)
    assert scaling.verifiers(load(0.24), 2, 2) < 1
    # What a step up or down leads to asks for no step back.
    for rows in (step / 100 for step in range(1, 400)):
        for target in range(1, 12):
            after = max(1, math.ceil(scaling.verifiers(load(rows), target, target)))
            assert max(1, math.ceil(scaling.verifiers(load(rows), after, after))) == after


def test_routers_by_streams_and_delay_and_others_by_cores() -> None:
    assert scaling.routers({"streams": [400, 600], "lag_s": [0.001, 0.002]}, 2, 2) == 2.0
    assert scaling.routers({"streams": [10], "lag_s": [0.2]}, 1, 1) == 2.0
    assert scaling.processes({"busy": [0.7, 0.7, 0.7]}, 3, 3) == pytest.approx(3.0)


def test_the_policy_keeps_the_number_until_something_is_reported() -> None:
    context = SimpleNamespace(
        deployment_name="verifier", aggregated_metrics={}, target_num_replicas=3, current_num_replicas=1
    )
    assert scaling.policy(context) == (3.0, {})
    context.aggregated_metrics = {"rows": {"x": 0.0}, "cache": {"x": 0.0}, "waiting": {"x": 0.0}}
    assert scaling.policy(context) == (1.0, {})


def test_a_number_or_bounds() -> None:
    settings = config.load(flags=["verifier.autoscaling={min_replicas: 2, max_replicas: 5}"], environ={})
    assert (settings.verifier.fewest, settings.verifier.most) == (2, 5)
    for flags, field, says in (
        (["verifier.autoscaling={max_replicas: 2}", "verifier.replicas=2"], "verifier", "set one of the two"),
        (["verifier.autoscaling={min_replicas: 3, max_replicas: 2}"], "verifier.autoscaling", "at most max_replicas, 2"),
        (["verifier.max_replicas_per_node=1", "verifier.stages=2"], "verifier", "stages: 1"),
    ):
        with refuses(ConfigurationError, field, says=says):
            config.load(flags=flags, environ={})
