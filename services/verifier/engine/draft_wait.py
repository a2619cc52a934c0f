"""Between two passes: waits for drafts that are missing as long as that pays, and notes what the wait has brought."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence

from services.verifier.engine.drafting import Drafting
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import LoopStats
from services.verifier.engine.waiting import Missing, Waiting, best_wait
from speculation.budget import Budget
from speculation.costs import Load
from speculation.tree import follow
from speculation.types import Verdict

# Tokens that a draft is worth at least: where time does not count, all are waited for.
_LEAST = 1e-3

# An origin's name and a group of its drafts.
_Group = tuple[str, str]


class DraftWait:
    """Does what ``waiting`` decides, with the drafts that ``drafting`` has, on the event loop's clock."""

    def __init__(self, drafting: Drafting, budget: Budget, stats: LoopStats, most_s: float) -> None:
        self._drafting = drafting
        self._budget = budget
        self._stats = stats
        self._waiting = Waiting(most_s)
        # What waits cost at present: tokens that the batch gives in a second.
        self._rate = 0.0

    async def for_batch(self, batch: Sequence[LiveRequest], load: Load, meanwhile: Callable[[], None]) -> None:
        """Wait for the drafts of the coming pass.

        Args:
            batch: its requests.
            load: what it holds of those that are decoding, without drafts.
            meanwhile: called before a wait, if there is one.
        """
        drafted = [live for live in batch if live.decoding and not live.undrafted]
        pays = self._budget.wanted(load).nodes > 0
        missing = self._missing(drafted, load) if pays else {}
        tokens, pass_s = _tokens(batch), self._budget.seconds(load)
        others = any(live.undrafted for live in batch)
        longest = self._waiting.seconds(list(missing.values()), tokens, pass_s, delays_others=others)
        if longest > 0:
            meanwhile()
            self._rate = tokens / pass_s
            began = _now()
            for live in drafted:
                live.waited_since = None if others else (began, live.expected())
            still = await self._wait(batch, drafted, load, began + longest)
            self._waiting.waited(_now() - began, in_vain=still.keys() == missing.keys())
        for live in drafted:
            # A draft that nobody wanted has not been missed.
            ready = sorted(live.ready().values(), key=lambda found: found.late)
            if pays or any(not found.late for found in ready):
                self._stats.count_draft(ready[0].draft if ready else None)

    async def _wait(
        self, batch: Sequence[LiveRequest], drafted: Sequence[LiveRequest], load: Load, deadline: float
    ) -> dict[_Group, Missing]:
        """Until all are there, the deadline comes, or the rest is not worth it. Gives what is missing then."""
        pass_s = self._budget.seconds(load)
        while missing := self._missing([live for live in drafted if not live.closed], load):
            left = deadline - _now()
            if left <= 0:
                for name in missing:
                    self._drafting.experience_of(*name).in_vain()
                break
            self._drafting.came.clear()
            try:
                async with asyncio.timeout(left):
                    await self._drafting.came.wait()
            except TimeoutError:
                continue
            # What came in the meantime makes the step worth more, and the rest of the wait dearer.
            rest = self._missing(drafted, load)
            if rest and math.isfinite(pass_s) and not best_wait(list(rest.values()), _tokens(batch), pass_s, left):
                return rest
        return missing

    def learn(self, live: LiveRequest, verdict: Verdict) -> None:
        """A step has decided this, which is not committed yet: has its wait brought anything?"""
        since, live.waited_since = live.waited_since, None
        if since is None or not self._rate:
            return
        began, expected = since
        came = (found for found in live.ready().values() if not found.late and found.at >= began)
        brought = max((follow(found.tree, verdict.committed) for found in came), default=0)
        gained = min(brought, len(verdict.accepted_path)) - expected
        if gained > 0:
            self._waiting.gained(gained, self._rate)

    def _missing(self, drafted: Iterable[LiveRequest], load: Load) -> dict[_Group, Missing]:
        """What may come, by who sends it."""
        asked: dict[_Group, list[tuple[float, float]]] = {}
        for live in drafted:
            for origin, mailbox in live.mailboxes.items():
                groups = mailbox.missing(live.tokens) if self._drafting.connected(origin) else {}
                for group, at in groups.items():
                    gain = mailbox.worth(group).in_time - live.expected()
                    # What is left of drafts that are sent ahead is as good as another one.
                    asked.setdefault((origin, group), []).append((at, max(0.0 if mailbox.ahead else _LEAST, gain)))
        found: dict[_Group, Missing] = {}
        now, alone = _now(), self._budget.seconds(load)
        for name, each in asked.items():
            tokens = sum(gain for _, gain in each)
            # Every token that it brings has been a row; of several, the one that was asked for last comes last.
            rows_s = 0.0 if math.isinf(alone) else self._budget.seconds(load.plus(math.ceil(tokens))) - alone
            left = self._drafting.experience_of(*name).left(now - max(at for at, _ in each))
            found[name] = Missing(left=left, tokens=tokens, seconds=rows_s)
        return found


def _tokens(batch: Iterable[LiveRequest]) -> float:
    """What a pass gives if it goes now: a token for everybody, and what drafts that are there bring."""
    return sum(1.0 + live.expected() for live in batch)


def _now() -> float:
    return asyncio.get_running_loop().time()
