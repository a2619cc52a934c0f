"""A fleet of verifiers through a day of requests, on a simulated clock.

Who gets a request is decided by ``cluster.verifiers.choice``, how many verifiers there are by ``cluster.ray.scaling`` as
Ray Serve would call it: the code that serves. Simulated are the replicas' time, nodes that come after minutes, and drains.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from benchmarks.fleet.cost_tables import Hardware
from benchmarks.fleet.hash_ring import HashRing
from benchmarks.fleet.outcomes import Ends, Moment
from benchmarks.fleet.replica_model import Job, ReplicaModel
from benchmarks.fleet.serve_scaling import Autoscaler
from benchmarks.fleet.step_pace import StepPace
from benchmarks.fleet.traffic import Arrival
from cluster.verifiers.choice import choices, place_of, session_of

# As services.router.service: seconds before a further attempt, and verifiers that may fail at one token of a request.
_RETRIES_S = (0.1, 1.0, 3.0)
_MOST_FAILED = 2
_NEVER = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """What the machines do.

    Attributes:
        node_s: seconds until a new node is there: asked for, booted, image fetched.
        load_s: seconds from there to the first request: weights read, kernels and costs measured.
        jitter: a start takes up to this share more or less.
        drain_s: as verifier.drain_s.
        idle_s: seconds for which an empty node is kept, and paid for (Ray's idleTimeoutSeconds).
        deaths: verifiers that die in the course of it, at random times; each is started again on its node.
        every_s: seconds between two moments of the record.
    """

    node_s: float = 180.0
    load_s: float = 120.0
    jitter: float = 0.2
    drain_s: float = 30.0
    idle_s: float = 60.0
    deaths: int = 2
    every_s: float = 300.0


@dataclass(slots=True)
class _Node:
    """A verifier's place: paid for from ``since_s`` on."""

    number: int
    since_s: float
    replica: ReplicaModel | None = None
    stopping: bool = False
    gone: bool = False


@dataclass(order=True, slots=True)
class _Event:
    at_s: float
    order: int
    do: Callable[[float], None] = field(compare=False)


class FleetSimulation:
    """Runs one fleet through the requests once.

    Args:
        scaler: decides the number; None: it stays at ``replicas``.
        replicas: that are there at the beginning, ready.
        seed: of starts and deaths.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        hardware: Hardware,
        pace: StepPace,
        config: FleetConfig,
        *,
        replicas: int,
        scaler: Autoscaler | None = None,
        seed: int = 1,
    ) -> None:
        self._arrivals, self._hardware, self._pace, self._config = arrivals, hardware, pace, config
        self._scaler, self._source = scaler, random.Random(seed)
        self._nodes: list[_Node] = []
        self._started = self._events_made = 0
        self._running: dict[str, ReplicaModel] = {}
        self._busy: list[ReplicaModel] = []
        self._events: list[_Event] = []
        self._order_of: Callable[[str], list[str]] = lambda place: []
        self._session = lru_cache(maxsize=65_536)(lambda conversation, attempt: session_of("", (conversation,), attempt))
        self._arrived = 0
        self.ends = Ends.of(len(arrivals))
        self.moments: list[Moment] = []
        self.gpu_s = 0.0
        for _ in range(replicas):
            node = self._new_node(0.0)
            self._ready(node, 0.0)

    def run(self) -> None:
        """Until every request has ended."""
        arrivals = self._arrivals
        end_s = arrivals[-1].at_s
        for at_s in sorted(self._source.uniform(0, end_s) for _ in range(self._config.deaths)):
            self._at(at_s, self._die)
        self._at(0.0, self._record)
        if self._scaler is not None:
            self._at(self._scaler.period_s, self._scale)
        coming, count = 0, len(arrivals)
        while True:
            next_s = arrivals[coming].at_s if coming < count else _NEVER
            first, first_s = None, min(next_s, self._events[0].at_s if self._events else _NEVER)
            for replica in self._busy:
                if replica.next_s < first_s:
                    first, first_s = replica, replica.next_s
            if first is not None:
                self._step(first, first_s)
            elif coming < count and next_s <= first_s:
                arrival = arrivals[coming]
                self._send(next_s, Job(coming, arrival.conversation, arrival.prompt, arrival.answer))
                coming += 1
            elif self._done():
                break
            else:
                event = heappop(self._events)
                event.do(event.at_s)
        self._bill(max(end_s, self.moments[-1].at_s))

    def _done(self) -> bool:
        ends = self.ends
        return len(ends.finished) + len(ends.refused) + len(ends.lost) == len(self._arrivals)

    def _at(self, at_s: float, do: Callable[[float], None]) -> None:
        self._events_made += 1
        heappush(self._events, _Event(at_s, self._events_made, do))

    # Requests

    def _send(self, now: float, job: Job) -> None:
        """To the verifier that the routers would choose; to the next one if that is full."""
        running = self._running
        if not running:
            self._later(now, job)
            return
        job.tries = 0
        for attempt in (job.attempt, job.attempt + 1):
            session = self._session(job.conversation, attempt)
            order = self._order_of(place_of(session))
            replica = running[choices(order, session, lambda name: running[name].load)[0]]
            if not replica.full:
                replica.take(now, job)
                return
        self._give_up(job)

    def _later(self, now: float, job: Job) -> None:
        """No verifier is there."""
        if job.tries == len(_RETRIES_S):
            self._give_up(job)
            return
        job.tries += 1
        self._at(now + _RETRIES_S[job.tries - 1], lambda at_s: self._send(at_s, job))

    def _give_up(self, job: Job) -> None:
        (self.ends.lost if job.first else self.ends.refused).append(job.number)

    def _step(self, replica: ReplicaModel, now: float) -> None:
        began, ended = replica.step(now)
        ends, arrivals = self.ends, self._arrivals
        if began is not None and not began.first:
            began.first = True
            ends.first_s[began.number] = now - arrivals[began.number].at_s
        if ended is not None:
            ends.took_s[ended.number] = now - arrivals[ended.number].at_s - ends.first_s[ended.number]
            ends.finished.append(ended.number)

    def _move(self, jobs: Sequence[Job], now: float) -> None:
        """As the router: the same request, with what it has got, to another verifier."""
        for job in jobs:
            if job.failed >= _MOST_FAILED:
                self._give_up(job)
                continue
            self.ends.moved += job.first
            self._at(now + _RETRIES_S[0], lambda at_s, job=job: self._send(at_s, job))  # type: ignore[misc]

    # Replicas

    def _new_node(self, now: float) -> _Node:
        self._started += 1
        node = _Node(self._started, now)
        self._nodes.append(node)
        return node

    def _start(self, now: float) -> None:
        node = self._new_node(now)
        self._at(now + self._varied(self._config.node_s + self._config.load_s), lambda at_s: self._ready(node, at_s))

    def _varied(self, seconds: float) -> float:
        return seconds * self._source.uniform(1 - self._config.jitter, 1 + self._config.jitter)

    def _ready(self, node: _Node, now: float) -> None:
        if node.stopping:
            return
        hardware = self._hardware
        name = f"replica-{node.number}-{self._events_made}"
        node.replica = ReplicaModel(name, self._pace, hardware.max_waiting, hardware.kv_cache_tokens, hardware.gpus, now)
        self._running[name] = node.replica
        self._busy.append(node.replica)
        self._changed()

    def _changed(self) -> None:
        """Every router builds a new ring."""
        ring = HashRing(self._running)
        self._order_of = lru_cache(maxsize=65_536)(ring.order)

    def _scale(self, now: float) -> None:
        scaler = self._scaler
        assert scaler is not None
        scaler.report(now, {name: replica.reported(now) for name, replica in self._running.items()})
        target = scaler.target_now(now)
        wanted = [node for node in self._nodes if not node.stopping]
        for _ in range(target - len(wanted)):
            self._start(now)
        # As Serve: those that are not running yet first, then the newest.
        wanted.sort(key=lambda node: (node.replica is not None, -node.number))
        for node in wanted[: max(0, len(wanted) - target)]:
            self._stop(node, now)
        self._at(now + scaler.period_s, self._scale)

    def _stop(self, node: _Node, now: float) -> None:
        node.stopping = True
        if node.replica is None:
            self._release(node, now)
            return
        del self._running[node.replica.name]
        self._changed()
        self._at(now + self._config.drain_s, lambda at_s: self._drained(node, at_s))

    def _drained(self, node: _Node, now: float) -> None:
        replica = node.replica
        if replica is not None:
            self._busy.remove(replica)
            self._move(replica.empty(now), now)
        self._at(now + self._config.idle_s, lambda at_s: self._release(node, at_s))

    def _die(self, now: float) -> None:
        alive = [node for node in self._nodes if node.replica is not None and not node.stopping]
        if not alive:
            return
        node = self._source.choice(alive)
        replica, node.replica = node.replica, None
        assert replica is not None
        del self._running[replica.name]
        self._busy.remove(replica)
        self._changed()
        self._move(replica.empty(now), now)
        self._at(now + self._varied(self._config.load_s), lambda at_s: self._ready(node, at_s))

    def _release(self, node: _Node, now: float) -> None:
        if not node.gone:
            node.gone = True
            self.gpu_s += self._hardware.gpus * (now - node.since_s)
            self._nodes.remove(node)

    def _bill(self, now: float) -> None:
        for node in list(self._nodes):
            self._release(node, max(now, node.since_s))

    def _record(self, now: float) -> None:
        before, self._arrived = self._arrived, bisect_right(self._arrivals, now, key=lambda arrival: arrival.at_s)
        self.moments.append(
            Moment(
                at_s=now,
                running=len(self._running),
                paid=len(self._nodes),
                waiting=sum(replica.waiting for replica in self._running.values()),
                arrived=self._arrived - before,
            )
        )
        self._at(now + self._config.every_s, self._record)
