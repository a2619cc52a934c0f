"""The loop's connection to its draft origins: sends them calls and puts their drafts into mailboxes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.logs.sparse import SparseLog
from services.verifier.engine.admission import Admission
from services.verifier.engine.clock import clock, now
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.deciding.asking import AskCost, Prices, gain_of_drafts, opening_pays
from services.verifier.engine.deciding.costly_sources import CostlySources, costly
from services.verifier.engine.deciding.draft_costs import Busy, DraftCosts
from services.verifier.engine.deciding.waiting import Experience
from services.verifier.engine.draft_receiver import OriginReceiver
from services.verifier.engine.forgetting import Forgetting
from services.verifier.engine.kept_features import KeptFeatures, pieces, rows_from
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.native.tree_check import TreeCheck
from services.verifier.engine.origins import Origin, check_trusted
from services.verifier.engine.passes import PassSize
from services.verifier.engine.stats import LoopStats
from speculation import limits
from speculation.budget import Wanted
from speculation.columns import DraftColumns
from speculation.errors import MalformedTree
from speculation.messages import CloseSession, Draft, DraftFailure, DraftingReply, FeatureChunk, Forgotten
from speculation.sources import draft_groups, spec_of
from speculation.tree import validate
from speculation.types import Features, Plan, Verdict

log = logging.getLogger(__name__)

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
        # Of drafters, by their names.
        self._complaints = SparseLog(log)
        self._origins = {origin.name: origin for origin in origins}
        if len(self._origins) < len(origins):
            raise ValueError("two origins of drafts have the same name")
        self._requests = requests
        self._config = config
        self._stats = stats
        self._forgetting = forgetting
        self._vocab_size = vocab_size
        self._experience: dict[tuple[str, str], Experience] = {}
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
            for (name, group), each in self._experience.items()
            if name == origin.name and (spec_of(group) is None or group in request.sources)
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
        origin.link.open(request.opening(sources, trusted=origin.trusted, asks=asks))
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
            # Where time does not count, each step waits for its own draft, so none may go without being asked for.
            free = (prices is None and not request.by_paper) or mailbox.asks(at)
            due = prices is None
            if prices is not None:
                cost, repeats = self.costs.of(origin.name, costly=bool(request.used)), request.repetition.begins
                due = self._due(cost, mailbox, wanted, prices, free=free, repeats=repeats)
            report = request.report(mailbox, verdict, wanted, asks=due and free)
            if report.max_nodes:
                mailbox.asked(report.length, at)
            # A window learns from its probes pass by pass.
            sends = due or (verdict.observation is not None and verdict.observation.probe_ids)
            if sends and not mailbox.held and features is None:
                mailbox.told(report.length)
                origin.link.step(report)
                continue
            if not mailbox.held.fits(report):
                self._send_held(origin, request, mailbox)
            mailbox.held.add(report, features if origin.wants_features(request.message.plan, request.sources) else None)
            if sends:
                self._send_held(origin, request, mailbox)

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

    def _due(self, cost: AskCost, mailbox: Mailbox, wanted: Wanted, prices: Prices, *, free: bool, repeats: bool) -> bool:
        turn, gain = self._passes // self._depth, mailbox.gain(prices)
        return mailbox.pace.due(gain, cost, prices, turn=turn, wanted=wanted.nodes > 0, free=free, repeats=repeats)

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
        found = self._experience.get((origin, group))
        if found is None:
            found = self._experience[origin, group] = Experience(self._config.draft_deadline_s)
        return found

    # --- replies ------------------------------------------------------------------------------------------------

    def on_reply(self, origin: Origin, reply: DraftingReply) -> None:
        """Handle a reply. A malformed draft is dropped."""
        if isinstance(reply, Forgotten):
            self._forgetting.answered(origin.name, reply.forget_id)
            return
        request, mailbox = self._addressee(origin, reply.session_id)
        if request is None or mailbox is None:
            return
        if isinstance(reply, DraftFailure):
            self._complaints.warning(
                origin.name, "no draft of %s for request %s: %s", origin.name, reply.session_id, reply.reason[:200]
            )
            if mailbox.failed(len(request.tokens), reopen=reply.reopen):
                self._open(origin, request)
        else:
            self._take(origin, request, mailbox, reply)
        self.came.set()

    def on_drafts(self, origin: Origin, drafts: DraftColumns) -> None:
        """Handle several drafts as ``on_reply`` does each. Their trees are checked together."""
        check = TreeCheck(drafts, self._vocab_size, origin.serves)
        for at, draft in enumerate(drafts.alone()):
            request, mailbox = self._addressee(origin, draft.session_id)
            if request is None or mailbox is None:
                continue
            try:
                # What is not sound is looked at once more, to say why.
                self._take(origin, request, mailbox, draft, sound=check.sound(at, request.message.plan.sources))
            except Exception:
                log.exception("handling a draft of %s failed; it is dropped", origin.name)
            self.came.set()

    def _addressee(self, origin: Origin, session_id: str) -> tuple[LiveRequest | None, Mailbox | None]:
        request = self._requests.find(session_id)
        return request, None if request is None else request.mailboxes.get(origin.name)

    def _take(self, origin: Origin, request: LiveRequest, mailbox: Mailbox, draft: Draft, *, sound: bool = False) -> None:
        planned = request.message.plan.sources
        if draft.group in planned and draft.group not in request.sources:
            # Of a model that was given up meanwhile.
            return
        try:
            if not sound:
                sources = origin.serves(planned)
                validate(draft.tree, vocab_size=self._vocab_size, max_nodes=limits.MAX_TREE_NODES, sources=sources)
        except MalformedTree as error:
            self._stats.drafts_malformed += 1
            mailbox.none_for(len(request.tokens))
            self._complaints.warning(
                origin.name, "dropped a draft of %s for request %s: %s", origin.name, draft.session_id, error
            )
            return
        tracked = draft.group in planned or (origin.name, draft.group) in self._experience
        if not tracked and len(self._experience) >= _GROUPS * len(self._origins):
            draft = replace(draft, group="")
        if not draft.unready and (request.in_pass or len(request.tokens) > draft.base_length + len(draft.assumed)):
            self._stats.drafts_late += 1
        mailbox.add(draft, request.tokens, request.most_credited, self._now())

    def on_connected(self, origin: Origin) -> None:
        """Open sessions for all admitted requests at an origin that has just connected."""
        self._forgetting.connected(origin.name)
        for request in self._requests.admitted():
            if origin.serves(request.sources):
                if origin.name in request.mailboxes:
                    request.mailboxes[origin.name].start_over()
                self._open(origin, request)
