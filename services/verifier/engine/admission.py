"""Admits waiting requests, and preempts running ones when the KV cache is full."""

from __future__ import annotations

import logging

from services.verifier.engine.clock import now
from services.verifier.engine.config import LoopConfig
from services.verifier.engine.expected_wait import SlotTimes, expected_wait
from services.verifier.engine.fair_queue import FairQueue
from services.verifier.engine.live_request import LiveRequest
from services.verifier.engine.stats import LoopStats
from services.verifier.model.target_port import Prefix, Sampling, Target
from speculation.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted
from speculation.messages import GenerationRequest

log = logging.getLogger(__name__)

# Rows kept free for each running request when a new one is admitted, so that an admission does not cause a preemption soon
# after.
_HEADROOM = 64
# When to try again, in seconds, while nothing is known of how long answers take.
_UNKNOWN_S = 1.0


class Admission:
    """The requests of one loop: fair between tenants, first come, first served within one.

    A request gets cache memory as its answer grows. When none is left, the request admitted last is preempted: it goes to
    the front of its tenant's line and its committed tokens are recomputed once there is room. A preempted request loses
    nothing of its answer, and the request admitted first always makes progress.

    A tenant that was served much more than one that waits gives up a slot in the same way. When too many requests wait, the
    newest of the tenant with the most is refused. One that would wait for too long is refused at once, and one that did is
    refused then. A request that goes on after tokens of another verifier is not: its answer would be lost.

    Attributes:
        waiting: requests not admitted yet, and preempted ones.
        live: running requests by id, in the order of admission.
    """

    def __init__(self, target: Target, config: LoopConfig, stats: LoopStats) -> None:
        self.waiting = FairQueue()
        self.live: dict[str, LiveRequest] = {}
        self._ended: list[LiveRequest] = []
        self._seats = SlotTimes()
        # Whether the cache had no room for the request whose turn it was.
        self._full = False
        self._target = target
        self._config = config
        self._stats = stats

    def check(self, request: GenerationRequest) -> None:
        """Check that ``request`` may join the waiting queue.

        Raises:
            InvalidArgument: its id is in use.
            ResourceExhausted: the queue is full, or the request would wait for too long.
        """
        if request.request_id in self.live or any(session.id == request.request_id for session in self.waiting):
            raise InvalidArgument("request_id", request.request_id, "unused")
        most = self._config.max_waiting
        if len(self.waiting) >= most + max(0, self._config.max_num_seqs - len(self.live)):
            full = ResourceExhausted(f"{most} requests are waiting already (max_waiting)", self._expected_s(0) or _UNKNOWN_S)
            other = self.waiting.longest()
            if other is None or not self._goes_before(request, other.request):
                raise full
            self._end(other, full)
        if (most_s := self._most_wait_s(request)) is not None and (wait_s := self._wait_s(request)) > most_s:
            told = f"it would wait for some {wait_s:.2g} s, longer than {most_s:g} s (max_wait_s)"
            raise ResourceExhausted(told, wait_s - most_s)

    def join(self, session: LiveRequest) -> None:
        """Let a request wait that was checked."""
        session.submitted_at = now()
        self.waiting.append(session)

    def _most_wait_s(self, request: GenerationRequest) -> float | None:
        """The longest that a request may wait; None: any time."""
        return None if request.committed else self._config.max_wait_s

    def _wait_s(self, request: GenerationRequest) -> float:
        """Expected seconds until a new request is admitted."""
        self.waiting.count(self.live.values())
        return self._expected_s(self.waiting.ahead(request, self.live.values()), request)

    def _expected_s(self, ahead: int, request: GenerationRequest | None = None) -> float:
        """Expected seconds until the one after ``ahead`` others is admitted; 0 while nothing is known of answers.

        Args:
            request: it; requests that owe their slot to its tenant give way.
        """
        mean_s = self._seats.mean_s
        if mean_s is None:
            return 0.0
        free = 0 if self._full and self.live else self._config.max_num_seqs - len(self.live)
        taken = [
            0.0 if request is not None and self.waiting.owes(live, request.tenant) else self._seats.left_s(live.id)
            for live in self.live.values()
        ]
        return expected_wait([0.0] * free + taken, ahead, mean_s)

    def _goes_before(self, request: GenerationRequest, other: GenerationRequest) -> bool:
        """Whether a new request takes the slot of a waiting one."""
        if request.tenant == other.tenant:
            return request.priority < other.priority
        return self.waiting.burden(other) > self.waiting.burden(request, 1)

    def admit(self) -> list[LiveRequest]:
        """Admit waiting requests while there is room. Returns those admitted for the first time, unknown to drafters."""
        new = []
        self._full = False
        self.waiting.count(self.live.values())
        while self.waiting:
            session = self.waiting.heads[0]
            if len(self.live) >= self._config.max_num_seqs and not self._give_way():
                break
            rows = session.rows_wanted
            prefix = Prefix(tokens=session.tokens, tenant=session.tenant, salt=session.request.cache_salt)
            params, prompt_length = session.request.sampling, len(session.request.prompt)
            sampling = Sampling(params=params, prompt_length=prompt_length, rule=session.rule)
            try:
                opened = self._target.open(session.id, rows, prefix, sampling=sampling, spare=_HEADROOM * len(self.live))
            except Exception:
                log.exception("no room could be made for %s", session.id)
                self._end(session, Internal("the request could not be admitted; the server's log says why"))
                continue
            if not opened and self.live:
                if self._give_way():
                    continue
                self._full = True
                break
            if not opened:
                # Nothing else is running, so the whole pool is too small for this request.
                most = "small enough for the key-value cache"
                self._end(session, InvalidArgument("max_tokens", session.request.sampling.max_tokens, most))
                continue
            self.waiting.remove(session)
            session.computed = self._target.computed(session.id)
            self._stats.prompt_tokens += len(session.tokens)
            self._stats.prompt_tokens_cached += session.computed
            self.live[session.id] = session
            self.waiting.begun(session)
            self._seats.taken(session.id)
            if not session.admitted:
                session.admitted = True
                session.queue_s = now() - session.submitted_at
                session.cached = session.computed
                new.append(session)
        return new

    def _give_way(self) -> bool:
        """Preempt a request for the one whose turn it is, if it owes that to its tenant; False: none does."""
        owing = self.waiting.debtor([live for live in self.live.values() if not live.in_pass])
        if owing is not None:
            self._preempt(owing, "it is another tenant's turn")
        return owing is not None

    def make_room(self, sessions: list[LiveRequest], *, wait: bool) -> list[LiveRequest]:
        """Get memory for the next pass of ``sessions``, preempting others if needed. Returns those that have it.

        Args:
            wait: whether passes are under way that may free memory when they end.
        """
        for session in sessions:
            while session.id in self.live and not self._grow(session):
                last = next(other for other in reversed(self.live.values()) if not other.in_pass)
                if last is session and len(self.live) == 1:
                    self._end(session, ResourceExhausted("the key-value cache is too small for the request"))
                elif last is session and wait:
                    break
                else:
                    self._preempt(last, "the cache is full")
        fitting = [session for session in sessions if session.id in self.live and self._grow(session)]
        return [session for session in fitting if session.id in self.live]

    def _grow(self, session: LiveRequest) -> bool:
        """Make room for the next pass; False if there is none.

        A target that raises ends the request. The result is then True, because an ended request needs no room.
        """
        try:
            return self._target.grow(session.id, session.rows_wanted)
        except Exception:
            log.exception("no room could be made for %s", session.id)
            self._end(session, Internal("the request could not go on; the server's log says why"))
            return True

    def left(self) -> list[LiveRequest]:
        """Requests to release: failed here, waiting for too long, or abandoned by their consumers and in no pass."""
        self._end_late()
        ended, self._ended = self._ended, []
        for session in [session for session in self.waiting if session.closed and not session.admitted]:
            self.waiting.remove(session)
        closed = [session for session in (*self.live.values(), *self.waiting) if session.closed and not session.in_pass]
        return ended + closed

    def _end_late(self) -> None:
        """Refuse those that have waited for too long, the last to come first: the others' waits are shorter without it."""
        for session in reversed(list(self.waiting)):
            most_s = self._most_wait_s(session.request)
            if most_s is not None and not session.admitted and now() - session.submitted_at > most_s:
                self.waiting.remove(session)
                wait_s = self._wait_s(session.request)
                told = f"it has waited for {most_s:g} s (max_wait_s)"
                self._end(session, ResourceExhausted(told, max(wait_s - most_s, self._expected_s(0)) or _UNKNOWN_S))

    def admitted(self) -> list[LiveRequest]:
        """Requests known to drafters: running or preempted."""
        return [*self.live.values(), *(session for session in self.waiting if session.admitted)]

    def find(self, session_id: str) -> LiveRequest | None:
        """The admitted request with this id, if there is one."""
        found = self.live.get(session_id)
        return found or next((session for session in self.admitted() if session.id == session_id), None)

    def forget(self, session: LiveRequest) -> None:
        """Remove an ended request."""
        if self.live.pop(session.id, None) is not None:
            self.waiting.count((session,))
        self.waiting.ended(session)
        self._seats.ended(session.id)
        if session in self.waiting:
            self.waiting.remove(session)

    def _end(self, session: LiveRequest, error: OutriderError) -> None:
        """Fail a request. The loop frees what it holds when it asks for ``left``."""
        self.forget(session)
        session.fail(error)
        self._ended.append(session)

    def _preempt(self, session: LiveRequest, why: str) -> None:
        log.info("%s is preempted after %d tokens: %s", session.id, len(session.tokens), why)
        self._stats.preemptions += 1
        self._target.close(session.id)
        session.computed = 0
        del self.live[session.id]
        self._seats.given_up(session.id)
        self.waiting.appendleft(session)
