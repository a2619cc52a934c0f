"""Puts what origins reply into the mailboxes of requests. What is malformed is dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from services.logs.sparse import SparseLog
from services.verifier.engine.admission import Admission
from services.verifier.engine.deciding.waiting import Experiences
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.mailbox import Mailbox
from services.verifier.engine.native.tree_check import TreeCheck
from services.verifier.engine.origins import Origin
from services.verifier.engine.stats import LoopStats
from speculation import limits
from speculation.columns import DraftColumns
from speculation.errors import MalformedTree
from speculation.messages import Draft, DraftFailure
from speculation.tree import validate

log = logging.getLogger(__name__)


class Arrivals:
    """Takes the replies of all origins of a loop.

    Args:
        most_experiences: of so many groups is it told apart what their drafts brought; further ones, which no plan names,
            count as one group.
        clock: gives what tells the seconds of the event loop's clock.
        reopen: opens a request's session at an origin anew.
    """

    def __init__(
        self,
        requests: Admission,
        stats: LoopStats,
        experiences: Experiences,
        vocab_size: int,
        *,
        most_experiences: int,
        clock: Callable[[], Callable[[], float]],
        reopen: Callable[[Origin, LiveRequest], None],
    ) -> None:
        # Of drafters, by their names.
        self._complaints = SparseLog(log)
        self._requests = requests
        self._stats = stats
        self._experiences = experiences
        self._vocab_size = vocab_size
        self._most_experiences = most_experiences
        self._clock = clock
        self._reopen = reopen

    def take(self, origin: Origin, reply: Draft | DraftFailure) -> bool:
        """Take a reply. Returns whether it is for a live request."""
        request, mailbox = self._addressee(origin, reply.session_id)
        if request is None or mailbox is None:
            return False
        if isinstance(reply, DraftFailure):
            self._complaints.warning(
                origin.name, "no draft of %s for request %s: %s", origin.name, reply.session_id, reply.reason[:200]
            )
            if mailbox.failed(len(request.tokens), reopen=reply.reopen):
                self._reopen(origin, request)
        else:
            self._take(origin, request, mailbox, reply)
        return True

    def take_together(self, origin: Origin, drafts: DraftColumns) -> bool:
        """Take several drafts as ``take`` does each; their trees are checked together. Returns whether one is for a live
        request.
        """
        check, group, name, taken = TreeCheck(drafts, self._vocab_size, origin.serves), drafts.group, origin.name, False
        experience = self._experiences.of(name, group) if self._experiences.known(name, group) else None
        running, find, now, took = self._requests.running, self._requests.find, self._clock(), list[float]()
        for number, draft in enumerate(drafts.alone()):
            request = running.get(draft.session_id) or find(draft.session_id)
            mailbox = None if request is None else request.mailboxes.get(name)
            if request is None or mailbox is None:
                continue
            taken, planned = True, request.message.plan.sources
            try:
                # What is not sound is looked at once more, to say why.
                sound = check.sound(number, planned)
                usual = sound and experience is not None and not request.in_pass and group not in planned
                # Each at its own time: a step that waits goes on once the last one is there.
                if usual and mailbox.add_next(draft, len(request.tokens), now(), took):
                    continue
                if experience is not None:
                    experience.came_together(took)
                    took.clear()
                self._take(origin, request, mailbox, draft, sound=sound)
            except Exception:
                log.exception("handling a draft of %s failed; it is dropped", origin.name)
        if experience is not None:
            experience.came_together(took)
        return taken

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
        tracked = draft.group in planned or self._experiences.known(origin.name, draft.group)
        if not tracked and len(self._experiences) >= self._most_experiences:
            draft = replace(draft, group="")
        if not draft.unready and (request.in_pass or len(request.tokens) > draft.base_length + len(draft.assumed)):
            self._stats.drafts_late += 1
        mailbox.add(draft, request.tokens, request.most_credited, self._clock()())
