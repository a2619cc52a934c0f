"""The waiting queue, fair between tenants.

Each tenant has a counter: the tokens that it was served, divided by its weight. The next request is one of the tenant with
the lowest counter (Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588). Of one tenant's requests,
lower priorities go first, then answers that have begun, then whoever came first.

A tenant that is new, or comes back, starts at most ``CREDIT`` below the highest counter present. So a burst after a pause is
served at once, but a tenant cannot save up claims for hours. With long answers slots become free too rarely: a running
request gives way to a tenant whose counter is more than ``QUANTUM`` lower.

By hand: no library has weights, priorities and running requests that give way in one queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Literal, NamedTuple

from services.verifier.engine.live_request import LiveRequest
from speculation.messages import GenerationRequest

# Tokens of a tenant of weight 1.
CREDIT, QUANTUM = 2048.0, 128.0
# Tenants whose counters are remembered while they are absent.
_REMEMBERED = 4096
# Weight of the newest answer in the mean length.
_NEWEST = 0.05
_Tenant = str | None
Turns = Literal["all", "under way", "none"]


class _Counted(NamedTuple):
    """A running request: its tenant, and its computed tokens when it began and when they were counted last."""

    tenant: _Tenant
    began: int
    tokens: int


class FairQueue:
    """Requests that wait, by tenant.

    Attributes:
        turns: of which requests there is a turn: all, those that are under way, or none.
    """

    def __init__(self) -> None:
        self.turns: Turns = "all"
        self._lines: dict[_Tenant, deque[LiveRequest]] = {}
        self._served: OrderedDict[_Tenant, float] = OrderedDict()
        self._counted: dict[str, _Counted] = {}
        # Mean of the tokens counted of a request.
        self._usual = 0.0
        # The highest counter with which a request began.
        self._most = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[LiveRequest]:
        for line in self._lines.values():
            yield from line

    @property
    def heads(self) -> list[LiveRequest]:
        """The first request of each tenant that has a turn; the one whose turn it is comes first."""
        firsts = {tenant: first for tenant, line in self._lines.items() if (first := self._first(line)) is not None}
        return [firsts[tenant] for tenant in sorted(firsts, key=lambda tenant: self._served[tenant])]

    def _first(self, line: deque[LiveRequest]) -> LiveRequest | None:
        if self.turns == "all":
            return line[0]
        return next((request for request in line if request.under_way), None) if self.turns == "under way" else None

    def append(self, request: LiveRequest) -> None:
        """Add a request to its tenant's line, behind those of its priority; if its answer has begun, behind such ones."""
        tenant = request.message.tenant
        self._served[tenant] = self._counter(tenant)
        self._served.move_to_end(tenant)
        own = request.message.priority
        self._insert(
            request,
            lambda other: (
                other.message.priority < own or (other.message.priority == own and (other.begun or not request.begun))
            ),
        )
        self._drop_old()

    def appendleft(self, request: LiveRequest) -> None:
        """Put a preempted request into its tenant's line, before those of the same priority."""
        self._served.setdefault(request.message.tenant, self._most - CREDIT)
        self._insert(request, lambda other: other.message.priority < request.message.priority)

    def _insert(self, request: LiveRequest, before: Callable[[LiveRequest], bool]) -> None:
        """Put a request behind those of its line that go ``before`` it."""
        line = self._lines.setdefault(request.message.tenant, deque())
        line.insert(sum(map(before, line)), request)

    def remove(self, request: LiveRequest) -> None:
        """Take a request out of the queue.

        Raises:
            ValueError: it is not in the queue.
        """
        tenant = request.message.tenant
        if tenant not in self._lines:
            raise ValueError("not in the queue")
        self._lines[tenant].remove(request)
        if not self._lines[tenant]:
            del self._lines[tenant]

    def __contains__(self, request: object) -> bool:
        return isinstance(request, LiveRequest) and request in self._lines.get(request.message.tenant, ())

    def begun(self, request: LiveRequest) -> None:
        """Count what is computed of an admitted request from now on. What it found in the cache was not computed for it."""
        self._most = max(self._most, self._served[request.message.tenant])
        before = self._counted.get(request.id) or _Counted(request.message.tenant, request.computed, 0)
        self._counted[request.id] = before._replace(tokens=max(before.tokens, request.computed))

    def count(self, running: Iterable[LiveRequest]) -> None:
        """Count what was computed since the last call. What is computed again after a preemption does not count."""
        for request in running:
            before = self._counted[request.id]
            if request.computed > before.tokens:
                self._served[before.tenant] += (request.computed - before.tokens) / request.message.weight
                self._counted[request.id] = _Counted(before.tenant, before.began, request.computed)

    def debtor(self, running: Iterable[LiveRequest]) -> LiveRequest | None:
        """The running request that should give way to the one whose turn it is; None: all may stay.

        Of the tenant that was served most, the last in ``running``.
        """
        before = self._served[self.heads[0].message.tenant]
        owing = [request for request in running if self._served[request.message.tenant] > before + QUANTUM]
        return max(reversed(owing), key=lambda request: self._served[request.message.tenant], default=None)

    def ended(self, request: LiveRequest) -> None:
        """Forget what was counted of a request that runs no more."""
        counted = self._counted.pop(request.id, None)
        if counted is not None:
            tokens = counted.tokens - counted.began
            self._usual += (_NEWEST if self._usual else 1.0) * (tokens - self._usual)

    def ahead(self, message: GenerationRequest, running: Iterable[LiveRequest]) -> int:
        """How many of those that wait would be admitted before a new request, if all become as long as usual."""
        owed = self._owed(message.tenant, running)
        lines = {tenant: [each.message for each in line] for tenant, line in self._lines.items()}
        lines[message.tenant] = [own for own in lines.get(message.tenant, ()) if own.priority <= message.priority]
        weights = {tenant: deque(each.weight for each in line) for tenant, line in lines.items()}
        turns = [(owed[tenant], number, tenant) for number, tenant in enumerate(weights)]
        heapify(turns)
        ahead = 0
        while weights[tenant := turns[0][2]] or tenant != message.tenant:
            counter, number, _ = turns[0]
            if not weights[tenant]:
                heappop(turns)
                continue
            ahead += 1
            heapreplace(turns, (counter + self._usual / weights[tenant].popleft(), number, tenant))
        return ahead

    def _owed(self, tenant: _Tenant, running: Iterable[LiveRequest]) -> dict[_Tenant, float]:
        """The counters of all who wait, and of ``tenant``, once those that run have become as long as usual."""
        owed = {name: self._served[name] for name in self._lines}
        owed.setdefault(tenant, self._counter(tenant))
        for request in running:
            counted = self._counted[request.id]
            if counted.tenant in owed:
                rest = self._usual - (counted.tokens - counted.began)
                owed[counted.tenant] += max(0.0, rest) / request.message.weight
        return owed

    def owes(self, request: LiveRequest, tenant: _Tenant) -> bool:
        """Whether a running request would give way to one of ``tenant``."""
        return self._served[request.message.tenant] > self._counter(tenant) + QUANTUM

    def _counter(self, tenant: _Tenant) -> float:
        """The counter of a tenant, if a request of it comes now."""
        served = self._served.get(tenant, -math.inf)
        return served if tenant in self._present() else max(served, self._most - CREDIT)

    def longest(self) -> LiveRequest | None:
        """The newest request whose answer has not begun, of the tenant with the most for its weight; None: no such one."""
        newest = [line[-1] for line in map(_new, self._lines.values()) if line]
        return max(newest, key=lambda request: self.burden(request.message), default=None)

    def burden(self, message: GenerationRequest, more: int = 0) -> float:
        """How many requests of its tenant wait whose answers have not begun, and ``more``, for its weight."""
        return (len(_new(self._lines.get(message.tenant, ()))) + more) / message.weight

    @property
    def new(self) -> int:
        """How many requests wait whose answers have not begun."""
        return sum(len(_new(line)) for line in self._lines.values())

    def _present(self) -> set[_Tenant]:
        return {*self._lines, *(counted.tenant for counted in self._counted.values())}

    def _drop_old(self) -> None:
        present = self._present() if len(self._served) > _REMEMBERED else set()
        for tenant in list(self._served)[: max(0, len(self._served) - _REMEMBERED)]:
            if tenant not in present:
                del self._served[tenant]


def _new(line: Iterable[LiveRequest]) -> list[LiveRequest]:
    return [request for request in line if not request.begun]
