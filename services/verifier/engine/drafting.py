"""The loop's connection to its draft origins: sends them calls and puts their drafts into mailboxes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from services.verifier.engine.admission import Admission
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.forgetting import Forgetting
from services.verifier.engine.kept_features import KeptFeatures, pieces, rows_from
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.origins import Origin
from services.verifier.engine.stats import LoopStats
from services.verifier.engine.waiting import Experience
from speculation import limits
from speculation.budget import Wanted
from speculation.errors import InvalidArgument, MalformedTree
from speculation.messages import CloseSession, Draft, DraftFailure, DraftingReply, FeatureChunk, Forgotten
from speculation.sources import SOURCES
from speculation.tree import validate
from speculation.types import Features, Plan, Verdict

log = logging.getLogger(__name__)

# Bound of the (origin, group) pairs tracked, per origin. Drafts of further groups count as the unnamed group.
_GROUPS = 8


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Implements ``DraftReceiver`` for one origin."""

    drafting: Drafting
    origin: Origin

    def on_reply(self, reply: DraftingReply) -> None:
        # A bad reply may cost speed, and nothing else.
        try:
            self.drafting.on_reply(self.origin, reply)
        except Exception:
            log.exception("a reply of %s was dropped", self.origin.name)

    def on_connected(self) -> None:
        self.drafting.on_connected(self.origin)


class Drafting:
    """Talks to every origin and keeps its drafts for each live request.

    Args:
        origins: their names must differ.

    Attributes:
        came: set when an origin has replied for a live request.
    """

    def __init__(
        self,
        origins: Sequence[Origin],
        requests: Admission,
        config: LoopConfig,
        stats: LoopStats,
        forgetting: Forgetting,
        vocab_size: int,
    ) -> None:
        self._origins = {origin.name: origin for origin in origins}
        if len(self._origins) < len(origins):
            raise ValueError("two origins of drafts have the same name")
        self._requests = requests
        self._config = config
        self._stats = stats
        self._forgetting = forgetting
        self._vocab_size = vocab_size
        self._experience: dict[tuple[str, str], Experience] = {}
        self._features = KeptFeatures(config.kept_feature_bytes)
        self.came = asyncio.Event()

    async def start(self) -> None:
        """Start every origin's link."""
        for origin in self._origins.values():
            await origin.link.start(_Receiver(self, origin))

    async def stop(self) -> None:
        """Stop every origin's link."""
        for origin in self._origins.values():
            await origin.link.stop()

    def check(self, plan: Plan) -> None:
        """Check that the plan's drafters may be used with its acceptance rule.

        Raises:
            InvalidArgument: the rule is rejection and one of its origins is not trusted.
        """
        if plan.acceptance != "rejection":
            return
        for origin in self._origins.values():
            if origin.serves(plan) and not origin.trusted:
                raise InvalidArgument("speculation.acceptance", plan.acceptance, f"walk: {origin.name} is not trusted")

    # --- calls to the origins -----------------------------------------------------------------------------------

    def open(self, live: LiveRequest) -> None:
        """Open a session at every origin that drafts for the request."""
        for origin in self._origins.values():
            if origin.serves(live.request.plan):
                self._open(origin, live)

    def _open(self, origin: Origin, live: LiveRequest) -> None:
        def experience(group: str) -> Experience:
            return self.experience_of(origin.name, group)

        if origin.name not in live.mailboxes:
            live.mailboxes[origin.name] = Mailbox(live.prefixes, experience)
        origin.link.open(live.opening(origin.serves(live.request.plan)))
        live.mailboxes[origin.name].opened(len(live.tokens), _now())
        if _wants_features(origin, live.request.plan):
            self._send_features(origin, live, self._features.of(live.id))

    def report(self, live: LiveRequest, verdict: Verdict, wanted: Wanted) -> None:
        """Send a step's verdict to the request's origins. It must be committed to ``live`` already."""
        features = verdict.observation.features if verdict.observation is not None else None
        if features is not None:
            features = self._keep(live, features)
        for origin, mailbox in self._of(live):
            if mailbox.given_up:
                continue
            own, last = verdict, None
            if verdict.observation is not None and verdict.observation.features is not None:
                if features is not None and _wants_features(origin, live.request.plan):
                    *first, last = pieces([features], limits.MAX_FEATURE_BYTES)
                    self._send_features(origin, live, first)
                own = replace(verdict, observation=replace(verdict.observation, features=last))
            now = _now()
            report = live.report(mailbox, own, wanted, asks=mailbox.asks(now))
            if report.max_nodes:
                mailbox.asked(report.length, now)
            origin.link.step(report)

    def show(self, live: LiveRequest, features: Features) -> None:
        """Send hidden states of the prompt to the origins that use them."""
        kept = self._keep(live, features)
        if kept is not None:
            for origin, mailbox in self._of(live):
                if not mailbox.given_up and _wants_features(origin, live.request.plan, prompt=True):
                    self._send_features(origin, live, [kept])

    def close(self, live: LiveRequest) -> None:
        """Close the request's sessions at its origins."""
        self._features.drop(live.id)
        for origin, _ in self._of(live):
            origin.link.close(CloseSession(session_id=live.id))

    def _keep(self, live: LiveRequest, features: Features) -> Features | None:
        """Keep the rows not reported yet, and return them. A preempted request computes its prefix twice."""
        new = rows_from(features, live.observed)
        if new is not None:
            live.observed = new.start + new.rows
            self._features.add(live.id, new)
        return new

    def _send_features(self, origin: Origin, live: LiveRequest, features: Iterable[Features]) -> None:
        for piece in pieces(features, limits.MAX_FEATURE_BYTES):
            origin.link.features(FeatureChunk(session_id=live.id, features=piece))

    def _of(self, live: LiveRequest) -> list[tuple[Origin, Mailbox]]:
        return [(self._origins[name], mailbox) for name, mailbox in live.mailboxes.items()]

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
            self._forgetting.answered(reply.forget_id)
            return
        live = self._requests.find(reply.session_id)
        mailbox = None if live is None else live.mailboxes.get(origin.name)
        if live is None or mailbox is None:
            return
        if isinstance(reply, DraftFailure):
            log.warning("no draft of %s for %s: %s", origin.name, reply.session_id, reply.reason[:200])
            if mailbox.failed(len(live.tokens), reopen=reply.reopen):
                self._open(origin, live)
        else:
            self._take(origin, live, mailbox, reply)
        self.came.set()

    def _take(self, origin: Origin, live: LiveRequest, mailbox: Mailbox, draft: Draft) -> None:
        try:
            sources = origin.serves(live.request.plan)
            validate(draft.tree, vocab_size=self._vocab_size, max_nodes=limits.MAX_TREE_NODES, sources=sources)
        except MalformedTree as error:
            self._stats.drafts_malformed += 1
            mailbox.none_for(len(live.tokens))
            log.warning("dropped a draft of %s for %s: %s", origin.name, draft.session_id, error)
            return
        if (origin.name, draft.group) not in self._experience and len(self._experience) >= _GROUPS * len(self._origins):
            draft = replace(draft, group="")
        if live.in_pass or len(live.tokens) > draft.base_length + len(draft.assumed):
            self._stats.drafts_late += 1
        mailbox.add(draft, live.tokens, live.most_credited, _now())

    def on_connected(self, origin: Origin) -> None:
        """Open sessions for all admitted requests at an origin that has just connected."""
        self._forgetting.connected(origin.name)
        for live in self._requests.admitted():
            if origin.serves(live.request.plan):
                if origin.name in live.mailboxes:
                    live.mailboxes[origin.name].start_over()
                self._open(origin, live)


def _wants_features(origin: Origin, plan: Plan, *, prompt: bool = False) -> bool:
    """Whether any of the plan's sources at ``origin`` uses hidden states, or with ``prompt`` those of the prompt."""
    if not plan.observe_layers or (prompt and not plan.observe_prompt):
        return False
    specs = [SOURCES.get(name) for name in origin.serves(plan)]
    return any(spec is not None and spec.layers and (spec.prompt_features or not prompt) for spec in specs)


def _now() -> float:
    return asyncio.get_running_loop().time()
