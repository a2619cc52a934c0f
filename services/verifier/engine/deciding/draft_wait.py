"""Before a pass: waits for missing drafts while that pays, and measures what the wait gained.

Requests that follow their paper's rule wait for their drafts whatever that costs, up to a deadline. Where other requests
share the pass, they wait as long as ``NamedShare`` allows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from services.verifier.engine.clock import now
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.named_share import NamedShare
from services.verifier.engine.deciding.undrafted import note_undrafted
from services.verifier.engine.deciding.waiting import Missing, Waiting, best_wait
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import LoopStats
from services.verifier.engine.switches import Why
from speculation.budget import Budget
from speculation.costs import Load
from speculation.tree import follow
from speculation.types import Verdict

# Least expected gain of a missing draft, in tokens: above zero, so every draft is waited for where time is free.
_LEAST = 1e-3

# The name of an origin, and one of its draft groups.
_Group = tuple[str, str]


class DraftWait:
    """Carries out the waits that ``waiting`` decides on, with the event loop's clock.

    Args:
        named: pays for what requests by their paper's rule make others wait.
        config: has the longest waits.
    """

    def __init__(self, drafting: Drafting, budget: Budget, stats: LoopStats, named: NamedShare, config: LoopConfig) -> None:
        self._drafting = drafting
        self._budget = budget
        self._stats = stats
        self._waiting = Waiting(config.draft_deadline_s)
        self._named = named
        self._most_named_s = config.named_deadline_s
        # Tokens per second of the current batch: the price of waiting.
        self._rate = 0.0

    async def for_batch(self, batch: Sequence[LiveRequest], load: Load, meanwhile: Callable[[], None]) -> None:
        """Wait for the drafts of the coming pass.

        Args:
            batch: the requests of the pass.
            load: the decoding requests of ``batch``, without drafts.
            meanwhile: called before the wait, if there is one.
        """
        drafted = [
            request
            for request in batch
            if request.mailboxes
            and request.computed == len(request.tokens) - 1
            and not (request.undrafted or request.closed)
        ]
        if not drafted:
            self.for_nobody(load)
            note_undrafted(batch, self._drafting, "deadline")
            return
        named = [request for request in drafted if request.by_paper]
        alone = all(request.by_paper for request in batch)
        if not alone and not self._drafting.quiet:
            await self._while_it_pays(batch, drafted, load, meanwhile)
        cut: Why = "deadline"
        if named:
            cut = await self._for_named(batch, named, load, meanwhile, alone=alone)
        note_undrafted(batch, self._drafting, cut)

    def for_nobody(self, load: Load) -> None:
        """Note that a pass without drafts begins."""
        self._waiting.pass_begins(self._budget.seconds(load))

    async def _for_named(
        self,
        batch: Sequence[LiveRequest],
        named: Sequence[LiveRequest],
        load: Load,
        meanwhile: Callable[[], None],
        *,
        alone: bool,
    ) -> Why:
        """Returns what ends the wait for drafts that are still missing."""
        most_s = self._most_named_s if alone else min(self._most_named_s, self._named.left_s)
        missing = self._missing(named, load)
        if alone:
            waits = any(not self._drafting.experience_of(*name).silent for name in missing)
        else:
            waits = any(each.left and each.left[0] <= most_s for each in missing.values())
        if waits:
            meanwhile()
            began = now()
            await self._wait(batch, named, load, missing, began + most_s, pass_s=math.inf)
            if not alone:
                self._named.spend(now() - began)
        self._count(named, pays=True)
        return "deadline" if most_s == self._most_named_s else "share"

    async def _while_it_pays(
        self, batch: Sequence[LiveRequest], drafted: Sequence[LiveRequest], load: Load, meanwhile: Callable[[], None]
    ) -> None:
        pays = self._budget.wanted(load).nodes > 0
        expected = {request: request.expected() for request in batch}
        missing = self._missing(drafted, load, expected) if pays else {}
        tokens, pass_s = sum([1.0 + each for each in expected.values()]), self._budget.seconds(load)
        others = len(drafted) < len(batch) and any(request.undrafted for request in batch)
        longest = self._waiting.seconds(list(missing.values()), tokens, pass_s, delays_others=others)
        if longest > 0:
            meanwhile()
            self._rate = tokens / pass_s
            began = now()
            for request in drafted:
                request.waited_since = None if others else (began, expected[request])
            still = await self._wait(batch, drafted, load, missing, began + longest, pass_s=pass_s)
            self._waiting.waited(now() - began, wasted=still.keys() == missing.keys())
        self._count([request for request in drafted if not request.by_paper], pays=pays)

    def _count(self, requests: Iterable[LiveRequest], *, pays: bool) -> None:
        """Count the drafts at hand. Where drafting does not pay, an absent one does not count as missed."""
        at_hand = [request.drafts() for request in requests]
        # One that came in time, if there is one.
        found = [min(each, key=attrgetter("late")) if len(each) > 1 else each[0] if each else None for each in at_hand]
        if not pays:
            found = [each for each in found if each is not None and not each.late]
        self._stats.count_drafts([None if each is None else each.draft for each in found])

    async def _wait(
        self,
        batch: Sequence[LiveRequest],
        drafted: Sequence[LiveRequest],
        load: Load,
        missing: dict[_Group, Missing],
        deadline: float,
        *,
        pass_s: float,
    ) -> dict[_Group, Missing]:
        """Wait until every draft is there, the deadline passes, or the rest is not worth it. Returns the missing ones."""
        while missing:
            left = deadline - now()
            if left <= 0:
                self._stats.deadline_misses += 1
                for name in missing:
                    self._drafting.experience_of(*name).wasted()
                break
            self._drafting.came.clear()
            try:
                async with asyncio.timeout(left):
                    await self._drafting.came.wait()
            except TimeoutError:
                continue
            missing = self._missing([request for request in drafted if not request.closed], load)
            # Each draft that arrives raises the step's yield, and with it the cost of waiting longer.
            if missing and math.isfinite(pass_s) and not best_wait(list(missing.values()), _tokens(batch), pass_s, left):
                break
        return missing

    def learn(self, request: LiveRequest, verdict: Verdict) -> None:
        """Credit the wait with the tokens it gained. Called after verification, before ``verdict`` is committed."""
        since, request.waited_since = request.waited_since, None
        if since is None or not self._rate:
            return
        began, expected = since
        if len(verdict.accepted_path) <= expected:
            return
        came = (found for found in request.drafts() if not found.late and found.at >= began)
        brought = max((follow(found.tree, verdict.committed) for found in came), default=0)
        gained = min(brought, len(verdict.accepted_path)) - expected
        if gained > 0:
            self._waiting.gained(gained, self._rate)

    def _missing(
        self, drafted: Iterable[LiveRequest], load: Load, bringing: Mapping[LiveRequest, float] | None = None
    ) -> dict[_Group, Missing]:
        """Drafts that may still arrive, by origin and group.

        Args:
            bringing: what each request's ``expected`` says; None: it is asked.
        """
        # How many tokens all drafts of a group would bring, and when the latest was asked for: requests of one group come
        # together, so that one sets the age.
        asked: dict[_Group, tuple[float, float]] = {}
        connected: dict[str, bool] = {}
        for request in drafted:
            for origin, mailbox in request.mailboxes.items():
                groups = mailbox.missing(request.tokens)
                if not groups:
                    continue
                if origin not in connected:
                    connected[origin] = self._drafting.connected(origin)
                if not connected[origin]:
                    continue
                expected, missing = request.expected() if bringing is None else bringing[request], [*groups.items()]
                if len(missing) > 1:
                    missing.sort(key=lambda each: self._typical_s(origin, each[0]))
                # With drafts sent ahead, the remainder of an earlier one may be just as good: gain may be zero.
                least = 0.0 if mailbox.ahead else _LEAST
                for group, at in missing:
                    worth = mailbox.worth(group).in_time.value
                    gain = worth - expected if worth - expected > least else least
                    tokens, latest = asked.get((origin, group), (0.0, at))
                    asked[origin, group] = tokens + gain, at if at > latest else latest
                    # Of several that are missing, a later one is worth what it brings beyond the earlier ones.
                    expected = worth if worth > expected else expected
        found: dict[_Group, Missing] = {}
        present, alone = now(), self._budget.seconds(load)
        for name, (tokens, latest) in asked.items():
            # Each token gained costs a row.
            rows_s = 0.0 if math.isinf(alone) else self._budget.seconds(load.plus(math.ceil(tokens))) - alone
            left = self._drafting.experience_of(*name).left(present - latest)
            found[name] = Missing(left=left, tokens=tokens, seconds=rows_s)
        return found

    def _typical_s(self, origin: str, group: str) -> float:
        return self._drafting.experience_of(origin, group).typical_s


def _tokens(batch: Iterable[LiveRequest]) -> float:
    """Expected tokens of a pass that begins now: one per request, and the accepted tokens of the drafts at hand."""
    return sum([1.0 + request.expected() for request in batch])
