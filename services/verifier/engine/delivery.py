"""Gives requests what a pass brought them: tokens to their consumers, and verdicts to their drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.verifier.engine.deciding.asking import Prices
from services.verifier.engine.deciding.draft_wait import DraftWait
from services.verifier.engine.drafting import Drafting
from services.verifier.engine.events import Events
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.pass_report import PassFigures, progress_of
from services.verifier.engine.passes import Part
from services.verifier.engine.singles import Singles
from services.verifier.engine.stats import LoopStats
from services.verifier.engine.together import Together, in_turn
from speculation.budget import Wanted
from speculation.messages import Progress
from speculation.records import maker

_make_progress = maker(Progress)


class Delivery:
    """Commits the results of passes, and keeps what consumers are to read until ``stream`` wakes them.

    Args:
        fail: ends one request with an error, and says what went wrong.
        release: frees what an ended request holds.
    """

    def __init__(
        self,
        stats: LoopStats,
        drafting: Drafting,
        draft_wait: DraftWait,
        fail: Callable[[LiveRequest, Exception, str], None],
        release: Callable[[LiveRequest], None],
    ) -> None:
        self._stats = stats
        self._drafting = drafting
        self._draft_wait = draft_wait
        self._fail = fail
        self._release = release
        # What consumers read of the last passes, before they are woken.
        self._told: list[Events] = []
        self._together = Together(stats, drafting, draft_wait, self._told)

    def deliver_singles(self, singles: Singles) -> None:
        """Give requests that go together their tokens."""
        for request, error in singles.failed:
            self._fail(request, error, "verification failed")
        saved_s, told = singles.saved_s, self._told
        for request, token in zip(singles.requests, singles.tokens, strict=True):
            request.computed += 1
            request.tokens.append(token)
            events = request.events
            events.add(
                _make_progress(token_ids=(token,), queue_s=request.queue_s, cached_tokens=request.cached, saved_s=saved_s)
            )
            told.append(events)
        self._stats.count_singles(singles.by_strategy())
        self._stats.saved_s += len(singles) * saved_s
        for request, reason in singles.ended:
            request.finish(reason)
            self._release(request)

    def deliver_all(self, parts: Sequence[Part], wanted: Wanted, prices: Prices | None, figures: PassFigures) -> None:
        """Give requests the results of their parts of a pass. An error ends the request of whose part it is."""
        for together, run in in_turn(parts, quiet=self._drafting.quiet):
            if not together:
                for part in run:
                    self.deliver(part, wanted, prices, figures)
                continue
            try:
                self._together.deliver(run, wanted, prices)
            except Exception as error:
                # Nothing that they do together is a request's own.
                for part in run:
                    self._fail(part.request, error, "the result of its pass could not be delivered")

    def deliver(self, part: Part, wanted: Wanted, prices: Prices | None, figures: PassFigures) -> None:
        """Give one request the result of its part of a pass. An error ends this request alone."""
        try:
            self._deliver(part, wanted, prices, figures)
        except Exception as error:
            self._fail(part.request, error, "the result of its pass could not be delivered")

    def _deliver(self, part: Part, wanted: Wanted, prices: Prices | None, figures: PassFigures) -> None:
        request, verdict = part.request, part.verdict
        if part.error is not None:
            self._fail(request, part.error, "verification failed")
            return
        if part.scored:
            request.scores.add(request.computed, part.scored)
        request.computed += part.chain
        if part.prompt_features is not None:
            self._drafting.show(request, part.prompt_features)
        if verdict is None:
            return
        request.computed += len(verdict.accepted_path)
        self._stats.count_pass(part.tree, verdict, request.message.plan.strategy)
        self._stats.saved_s += part.saved_s
        if request.waited_since is not None:
            self._draft_wait.learn(request, verdict)
        if request.used:
            self._drafting.rate(request, verdict)
        request.commit(verdict.committed)
        request.say(progress_of(part, verdict, figures))
        self._told.append(request.events)
        if verdict.finish_reason is not None:
            request.finish(verdict.finish_reason)
            self._release(request)
        elif not request.plain:
            self._drafting.report(request, verdict, wanted, prices)

    def stream(self) -> None:
        """Wake the consumers of the events queued in the last passes."""
        for events in self._told:
            events.wake()
        self._told.clear()
