"""Holds each step of a loop against a quiet one: decides whether the coming step drafts, and says what drafting saved."""

from __future__ import annotations

import math

from services.verifier.engine.deciding.contest import Contest
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.passes import PassSize, PassWork, decoding_load
from speculation.budget import Budget
from speculation.costs import Load


class StepContest:
    """The contest between drafting and plain decoding in one loop. There is none where time does not count.

    Args:
        contest: begins with what it knows.
    """

    def __init__(self, budget: Budget, drafting: Drafting, contest: Contest) -> None:
        self._budget = budget
        self._drafting = drafting
        timed = math.isfinite(budget.seconds(Load(rows=1, requests=1, keys=0)))
        self._contest = contest if timed else None
        drafting.quiet = timed and not contest.drafting

    def learn(self, work: PassWork, size: PassSize, whole_s: float, *, busy: bool, speculates: bool) -> None:
        """Learn from a step before it is committed. Sets ``saved_s`` of parts and singles, and whether drafting is quiet.

        Args:
            size: that of its pass.
            whole_s: seconds from the end of the pass before to its end.
            busy: an origin had work for a request of the pass meanwhile.
            speculates: whether any running request may be drafted for.
        """
        if self._contest is None:
            return
        parts, singles = work.parts, work.singles
        decoded = {part.request: len(part.verdict.committed) for part in parts if part.verdict and part.chain == 1}
        count = len(singles) + len(decoded)
        if not count:
            return
        plain_s, prompt_s = self._budget.seconds(decoding_load(decoded).together(singles.load)), 0.0
        if count < len(work):
            nodes = sum(len(part.tree) for part in parts)
            prompt_s = max(0.0, self._budget.prompt_seconds(size.load.plus(-nodes)) - plain_s)
        self._count_saved(work, count, whole_s, plain_s, prompt_s)
        expected = {"seconds": whole_s, "plain_s": plain_s, "prompt_s": prompt_s}
        if not speculates:
            self._contest.learn_plain(requests=count, **expected)
        elif any(request.by_paper for request in decoded):
            # They draft in either case, so the step says nothing of the others.
            pass
        elif self._drafting.quiet or not any(use.trial for request in decoded for use in request.used.values()):
            # A costly source that is tried pays for it, or goes, by its own account.
            repeats = any(request.repetition.begins for request in decoded)
            tokens = len(singles) + sum(decoded.values())
            self._contest.learn(requests=count, tokens=tokens, busy=busy, repeats=repeats, **expected)
        self._drafting.quiet = not self._contest.drafting

    def _count_saved(self, work: PassWork, requests: int, whole_s: float, plain_s: float, prompt_s: float) -> None:
        """A request's tokens after the first one would each have taken another plain step."""
        assert self._contest is not None
        another_s = plain_s * self._contest.plain_share(requests, prompts=False)
        this_s = (plain_s + prompt_s) * self._contest.plain_share(requests, prompts=prompt_s > 0)
        work.singles.saved_s = this_s - whole_s
        for part in work.parts:
            if part.verdict is not None:
                part.saved_s = this_s + (len(part.verdict.committed) - 1) * another_s - whole_s
