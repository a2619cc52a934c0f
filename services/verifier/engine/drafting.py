"""The loop's connection to its draft origins: sends them calls and puts their drafts into mailboxes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.verifier.engine.admission import Admission
from services.verifier.engine.arrivals import Arrivals
from services.verifier.engine.clock import clock, now
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.asking import Prices, gain_of_drafts, opening_pays
from services.verifier.engine.deciding.costly_sources import CostlySources, costly
from services.verifier.engine.deciding.draft_costs import Busy, DraftCosts
from services.verifier.engine.deciding.waiting import Experience, Experiences
from services.verifier.engine.draft_receiver import OriginReceiver
from services.verifier.engine.forgetting import Forgetting
from services.verifier.engine.kept_features import KeptFeatures, pieces, rows_from
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.opening import opening
from services.verifier.engine.origins import Origin, check_trusted
from services.verifier.engine.passes import PassSize
from services.verifier.engine.reports_together import ReportsToOne
from services.verifier.engine.stats import LoopStats
from speculation import limits
from speculation.budget import Wanted
from speculation.columns import DraftColumns
from speculation.messages import CloseSession, DraftingReply, FeatureChunk, Forgotten, StepReport
from speculation.sources import draft_groups, spec_of
from speculation.types import Features, Plan, Verdict

# Bound of the (origin, group) pairs tracked, per origin. Drafts of further groups, which no plan names, count as one group.
_GROUPS = 8
# Passes after the end of a model's use in which it may still compute: they say nothing about those before and after.
_SETTLING = 8


class Drafting:
    """Talks to every origin and keeps its drafts for each live request.

    Args:
        origins: their names must differ.
        depth: most passes under way at once.
        timed: whether time counts, so that a source may be left out for what it costs.

    Attributes:
        came: set when an origin has replied for a live request.
        costs: what drafts cost the passes that run meanwhile.
        quiet: nobody is asked for drafts or told anything, and no session is opened, until this is unset; requests by their
            paper's rule are excepted.
    """

    def __init__(
        self,
        origins: Sequence[Origin],
        requests: Admission,
        config: LoopConfig,
        stats: LoopStats,
        forgetting: Forgetting,
        vocab_size: int,
        depth: int,
        *,
        timed: bool,
    ) -> None:
        self._origins = {origin.name: origin for origin in origins}
        if len(self._origins) < len(origins):
            raise ValueError("two origins of drafts have the same name")
        self._requests = requests
        self._config = config
        self._stats = stats
        self._forgetting = forgetting
        self._experiences = Experiences(config.draft_deadline_s)
        self._arrivals = Arrivals(
            requests,
            stats,
            self._experiences,
            vocab_size,
            most_experiences=_GROUPS * len(self._origins),
            clock=lambda: self._now,
            reopen=self._open,
        )
        self.costs = DraftCosts(self._origins)
        self._costly = CostlySources(stats.source_choices, stats.weighed)
        self._timed = timed
        # Passes until a source that was given up is taken to have stopped computing.
        self._settling = 0
        self._passes = 0
        self._depth = depth
        self._features = KeptFeatures(config.kept_feature_bytes)
        self.came = asyncio.Event()
        self.quiet = False
        # Requests that began, or were to be opened anew, in quiet: an origin has not heard of them.
        self._missed: dict[str, LiveRequest] = {}

    async def start(self) -> None:
        """Start every origin's link."""
        self._now = clock()
        for origin in self._origins.values():
            await origin.link.start(OriginReceiver(origin, self.on_reply, self.on_drafts, self.on_connected))

    async def stop(self) -> None:
        """Stop every origin's link."""
        for origin in self._origins.values():
            await origin.link.stop()

    def check(self, plan: Plan) -> None:
        """As ``check_trusted``, of all origins."""
        check_trusted(plan, self._origins.values())

    # --- calls to the origins -----------------------------------------------------------------------------------

    def open(self, request: LiveRequest, prices: Prices | None) -> None:
        """Open a session at every origin that drafts for the request.

        Args:
            prices: with this request in the batch; None where time does not count.
        """
        if request.by_paper:
            # Its drafts need not pay.
            prices = None
        elif self.quiet:
            self._miss(request)
            return
        if prices is not None:
            self._costly.begin(request, prices.requests, now())
        for origin in self._origins.values():
            if origin.serves(request.sources):
                # The prompt's pass does not wait: a slow drafter's first draft would keep it from making the second in time.
                asks = not request.by_paper and (prices is None or self._asks_at_once(origin, request, prices))
                self._open(origin, request, asks=asks)

    def open_missed(self, prices: Prices | None) -> None:
        """Open the sessions of requests that began in quiet, once it has ended.

        Sources that a model runs for, or that read hidden states, do not join: they have missed the prompt.
        """
        if self.quiet or not self._missed:
            return
        missed, self._missed = self._missed, {}
        for request in missed.values():
            request.missed = False
            for name in set(costly(request.message.plan)).intersection(request.sources):
                request.sources = tuple(each for each in request.sources if each != name)
                request.switches.note(request.generated, f"without {name}: plain decoding was faster for a while")
            for origin in self._origins.values():
                if origin.serves(request.sources) and origin.name not in request.mailboxes:
                    self._open(origin, request, asks=prices is None or self._asks_at_once(origin, request, prices))

    def _miss(self, request: LiveRequest) -> None:
        request.missed = True
        self._missed[request.id] = request

    def _asks_at_once(self, origin: Origin, request: LiveRequest, prices: Prices) -> bool:
        """Whether to ask for a draft before anything is known of the request's text."""
        if request.used or request.message.prediction:
            return True
        drafted = [
            (each.worth, each.typical_s)
            for group, each in self._experiences.of_groups(origin.name)
            if spec_of(group) is None or group in request.sources
        ]
        return opening_pays(gain_of_drafts(drafted, prices), self.costs.of(origin.name, costly=False), prices)

    def _open(self, origin: Origin, request: LiveRequest, *, asks: bool = True) -> None:
        if self.quiet and not request.by_paper:
            request.mailboxes.pop(origin.name, None)
            self._miss(request)
            return

        def experience(group: str) -> Experience:
            return self.experience_of(origin.name, group)

        if origin.name not in request.mailboxes:
            request.mailboxes[origin.name] = Mailbox(request.prefixes, experience)
        sources = origin.serves(request.sources)
        origin.link.open(opening(request, sources, trusted=origin.trusted, asks=asks))
        request.mailboxes[origin.name].opened(len(request.tokens), now(), asks=asks, groups=draft_groups(sources))
        if origin.wants_features(request.message.plan, request.sources):
            self._send_features(origin, request, self._features.of(request.id))

    def report(self, request: LiveRequest, verdict: Verdict, wanted: Wanted, prices: Prices | None) -> None:
        """Report a step's verdict to the request's origins, at once or together with later ones.

        It must be committed to ``request`` already.
        """
        if not request.mailboxes and not request.used and verdict.observation is None:
            return
        features = None
        if verdict.observation is not None and verdict.observation.features is not None:
            features = self._keep(request, verdict.observation.features)
            verdict = replace(verdict, observation=replace(verdict.observation, features=None))
        if self.quiet and not request.by_paper:
            self._hold(request, verdict, wanted, features)
            return
        if request.by_paper:
            prices = None
        at, reopened = self._now(), self._leave_out(request) if request.used else ()
        for origin, mailbox in self._of(request):
            if mailbox.given_up or origin.name in reopened:
                continue
            due, free = self._due(origin, request, mailbox, wanted, prices, at)
            report = request.report(mailbox, verdict, wanted, asks=due and free)
            if report.max_nodes:
                mailbox.asked(report.length, at)
            # A window learns from its probes pass by pass.
            sends = due or (verdict.observation is not None and verdict.observation.probe_ids)
            if sends and not mailbox.held and features is None:
                mailbox.told(report.length)
                origin.link.step(report)
                continue
            self._add_held(origin, request, mailbox, report, features)
            if sends:
                self._send_held(origin, request, mailbox)

    def report_together(
        self, requests: Sequence[LiveRequest], verdicts: Sequence[Verdict], wanted: Wanted, prices: Prices | None
    ) -> None:
        """As ``report`` of each, none of which has hidden states, probes or costly sources, or goes by its paper's rule."""
        at, sending = self._now(), {name: ReportsToOne(origin.link) for name, origin in self._origins.items()}
        for request, verdict in zip(requests, verdicts, strict=True):
            for name, mailbox in request.mailboxes.items():
                if mailbox.given_up:
                    continue
                origin = self._origins[name]
                due, free = (True, True) if prices is None else self._due(origin, request, mailbox, wanted, prices, at)
                nodes = request.wanted_nodes(mailbox, wanted) if due and free else 0
                if nodes:
                    mailbox.asked(verdict.length, at)
                if due and not mailbox.held:
                    mailbox.told(verdict.length)
                    sending[name].add(request, verdict, nodes, 0.0 if mailbox.ahead else wanted.min_probability)
                    continue
                # All in their order.
                sending[name].send()
                self._add_held(origin, request, mailbox, request.report(mailbox, verdict, wanted, asks=due and free), None)
                if due:
                    self._send_held(origin, request, mailbox)
        for reports in sending.values():
            reports.send()

    def _add_held(
        self, origin: Origin, request: LiveRequest, mailbox: Mailbox, report: StepReport, features: Features | None
    ) -> None:
        if not mailbox.held.fits(report):
            self._send_held(origin, request, mailbox)
        mailbox.held.add(report, features if origin.wants_features(request.message.plan, request.sources) else None)

    def _hold(self, request: LiveRequest, verdict: Verdict, wanted: Wanted, features: Features | None) -> None:
        """Keep a quiet step's report for later. A session that falls too far behind is closed, and opened anew later."""
        for origin, mailbox in self._of(request):
            report = request.report(mailbox, verdict, wanted, asks=False)
            if mailbox.held.fits(report):
                mailbox.held.add(report, features if origin.wants_features(request.message.plan, request.sources) else None)
                continue
            del request.mailboxes[origin.name]
            origin.link.close(CloseSession(session_id=request.id))
            self._miss(request)

    def rate(self, request: LiveRequest, verdict: Verdict) -> None:
        """Learn what a request's sources brought to a step, before it is committed."""
        if not self.quiet:
            self._costly.learn_step(request, verdict.committed, len(verdict.accepted_path))

    def _leave_out(self, request: LiveRequest) -> set[str]:
        """Give up costly sources that do not pay. Returns the origins whose sessions with the others were opened anew."""
        before = request.sources
        gone = self._costly.given_up(request, len(self._requests.running)) if self._timed else ()
        reopened = set()
        self._settling = _SETTLING if gone else self._settling
        for origin, mailbox in self._of(request) if gone else ():
            if origin.serves(before) == origin.serves(request.sources):
                continue
            if origin.serves(request.sources):
                mailbox.leave_out(gone)
                self._open(origin, request)
                reopened.add(origin.name)
            else:
                del request.mailboxes[origin.name]
                origin.link.close(CloseSession(session_id=request.id))
        return reopened

    def _due(
        self, origin: Origin, request: LiveRequest, mailbox: Mailbox, wanted: Wanted, prices: Prices | None, at: float
    ) -> tuple[bool, bool]:
        """Whether a report is due, and whether the origin may be asked for a draft."""
        # Where time does not count, each step waits for its own draft, so none may go without being asked for.
        free = (prices is None and not request.by_paper) or mailbox.asks(at)
        if prices is None:
            return True, free
        cost = self.costs.of(origin.name, costly=bool(request.used))
        due = mailbox.pace.due(
            mailbox.gain(prices),
            cost,
            prices,
            turn=self._passes // self._depth,
            wanted=wanted.nodes > 0,
            free=free,
            repeats=request.repetition.begins,
        )
        return due, free

    def _send_held(self, origin: Origin, request: LiveRequest, mailbox: Mailbox) -> None:
        features, report = mailbox.held.take()
        mailbox.told(len(request.tokens))
        self._send_features(origin, request, features)
        origin.link.step(report)

    def learn(
        self, requests: Sequence[LiveRequest], size: PassSize, busy: Busy, seconds: float, whole_s: float, expected_s: float
    ) -> None:
        """Learn what drafting costs from a pass, before what it brought is committed.

        Args:
            requests: those of the pass; ``busy``: as from ``costs``.
            seconds: that it took, until its result was here; ``whole_s``: from the end of the pass before.
            expected_s: seconds of such a pass; infinite where time does not count.
        """
        self._passes += 1
        self._settling = max(0, self._settling - 1)
        if self._settling:
            return
        if math.isinf(expected_s) or size.prompts or size.named:
            # What a request by its paper costs says nothing about the others, who may leave out what it uses.
            return
        self._costly.learn_pass(requests, whole_s, idle=self.quiet)
        self.costs.learn(size, busy, seconds, expected_s)

    def show(self, request: LiveRequest, features: Features) -> None:
        """Send hidden states of the prompt to the origins that use them."""
        if (kept := self._keep(request, features)) is not None:
            for origin, mailbox in self._of(request):
                if not mailbox.given_up and origin.wants_features(request.message.plan, request.sources, prompt=True):
                    self._send_features(origin, request, [kept])

    def close(self, request: LiveRequest) -> None:
        """Close the request's sessions at its origins."""
        self._costly.end(request)
        self._stats.count_named(request.switches.sources, request.switches.steps, request.switches.undrafted)
        self._missed.pop(request.id, None)
        self._features.drop(request.id)
        for origin, mailbox in self._of(request):
            if mailbox.held and not mailbox.given_up:
                self._send_held(origin, request, mailbox)
            origin.link.close(CloseSession(session_id=request.id))

    def _keep(self, request: LiveRequest, features: Features) -> Features | None:
        """Keep the rows not reported yet, and return them. A preempted request computes its prefix twice."""
        new = rows_from(features, request.observed)
        if new is not None:
            request.observed = new.start + new.rows
            self._features.add(request.id, new)
        return new

    def _send_features(self, origin: Origin, request: LiveRequest, features: Iterable[Features]) -> None:
        for piece in pieces(features, limits.MAX_FEATURE_BYTES):
            origin.link.features(FeatureChunk(session_id=request.id, features=piece))

    def _of(self, request: LiveRequest) -> list[tuple[Origin, Mailbox]]:
        return [(self._origins[name], mailbox) for name, mailbox in request.mailboxes.items()]

    def connected(self, origin: str) -> bool:
        """Whether the origin's link is connected."""
        return self._origins[origin].link.connected

    def experience_of(self, origin: str, group: str) -> Experience:
        """The statistics of one origin's draft group."""
        return self._experiences.of(origin, group)

    # --- replies ------------------------------------------------------------------------------------------------

    def on_reply(self, origin: Origin, reply: DraftingReply) -> None:
        """Handle a reply. A malformed draft is dropped."""
        if isinstance(reply, Forgotten):
            self._forgetting.answered(origin.name, reply.forget_id)
        elif self._arrivals.take(origin, reply):
            self.came.set()

    def on_drafts(self, origin: Origin, drafts: DraftColumns) -> None:
        """Handle several drafts as ``on_reply`` does each."""
        if self._arrivals.take_together(origin, drafts):
            self.came.set()

    def on_connected(self, origin: Origin) -> None:
        """Open sessions for all admitted requests at an origin that has just connected."""
        self._forgetting.connected(origin.name)
        for request in self._requests.admitted():
            if origin.serves(request.sources):
                if origin.name in request.mailboxes:
                    request.mailboxes[origin.name].start_over()
                self._open(origin, request)
