"""Admits waiting requests, and preempts running ones when the KV cache is full."""

from __future__ import annotations

import asyncio
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

# When to try again, in seconds, while nothing is known of how long answers take.
_UNKNOWN_S = 1.0
# Seconds by which who has waited for too long is found later, so that no clock's rounding hides it.
_LATE_S = 0.01


class Admission:
    """The requests of one loop: fair between tenants, first come, first served within one.

    A request gets cache memory as its answer grows. When none is left, the request admitted last is preempted: it goes to
    the front of its tenant's line and its committed tokens are recomputed once there is room. A preempted request loses
    nothing of its answer, and the request admitted first always makes progress.

    A tenant that was served much more than one that waits gives up a slot in the same way. When too many requests wait, the
    newest of the tenant with the most is refused. One that would wait for too long is refused at once, and one that did is
    refused then. Answers that have begun, here or at another verifier, are not: they would be lost. They wait beside those
    bounds, and there are never more of them than were answered at once.

    Attributes:
        waiting: requests not admitted yet, and preempted ones.
        running: admitted requests by id, in the order of admission.
    """

    def __init__(self, target: Target, config: LoopConfig, stats: LoopStats) -> None:
        self.waiting = FairQueue()
        self.running: dict[str, LiveRequest] = {}
        self._ended: list[LiveRequest] = []
        self._slots = SlotTimes()
        # Whether the cache had no room for the request whose turn it was.
        self._full = False
        self._target = target
        self._config = config
        self._stats = stats
        self._looking: asyncio.TimerHandle | None = None

    def check(self, message: GenerationRequest) -> None:
        """Check that ``message`` may join the waiting queue.

        Raises:
            InvalidArgument: its id is in use.
            ResourceExhausted: the queue is full, or the request would wait for too long.
        """
        if message.request_id in self.running or any(each.id == message.request_id for each in self.waiting):
            raise InvalidArgument("request_id", message.request_id, "unused")
        if not message.committed and self._crowded and self._place_of(message) is None:
            raise self._no_place()
        if (most_s := self._most_wait_s(message)) is not None and (wait_s := self._wait_s(message)) > most_s:
            told = f"it would wait for some {wait_s:.2g} s, longer than {most_s:g} s (max_wait_s)"
            raise ResourceExhausted(told, wait_s - most_s)

    def join(self, request: LiveRequest) -> None:
        """Let a request wait that was checked. Where too many do, another one is refused now that this one is sure to."""
        if not request.begun and self._crowded and (other := self._place_of(request.message)) is not None:
            self._end(other, self._no_place())
        request.submitted_at = now()
        self.waiting.append(request)
        if self._looking is None:
            self._look_later()

    def leave(self, request: LiveRequest) -> None:
        """Note that nobody reads the answer any more. One that waits counts no more, however long the present step takes."""
        request.closed = True
        if request in self.waiting:
            self.waiting.remove(request)
            self._ended.append(request)

    @property
    def _crowded(self) -> bool:
        """Whether as many new requests wait as may."""
        new = self.waiting.new
        begun = len(self.waiting) - new
        return new >= self._config.max_waiting + max(0, self._config.max_num_seqs - len(self.running) - begun)

    def _place_of(self, message: GenerationRequest) -> LiveRequest | None:
        """The waiting request whose place a new one takes where too many wait; None: it takes nobody's."""
        other = self.waiting.longest()
        return other if other is not None and self._goes_before(message, other.message) else None

    def _no_place(self) -> ResourceExhausted:
        told = f"{self._config.max_waiting} requests are waiting already (max_waiting)"
        return ResourceExhausted(told, self._expected_s(0) or _UNKNOWN_S)

    def _most_wait_s(self, message: GenerationRequest) -> float | None:
        """The longest that a request may wait; None: any time."""
        return None if message.committed else self._config.max_wait_s

    def _wait_s(self, message: GenerationRequest) -> float:
        """Expected seconds until a new request is admitted."""
        self.waiting.count(self.running.values())
        return self._expected_s(self.waiting.ahead(message, self.running.values()), message)

    def _expected_s(self, ahead: int, message: GenerationRequest | None = None) -> float:
        """Expected seconds until the one after ``ahead`` others is admitted; 0 while nothing is known of answers.

        Args:
            message: it; requests that owe their slot to its tenant give way.
        """
        mean_s = self._slots.mean_s
        if mean_s is None:
            return 0.0
        free = 0 if self._full and self.running else self._config.max_num_seqs - len(self.running)
        taken = [
            0.0 if message is not None and self.waiting.owes(each, message.tenant) else self._slots.left_s(each.id)
            for each in self.running.values()
        ]
        return expected_wait([0.0] * free + taken, ahead, mean_s)

    def _goes_before(self, message: GenerationRequest, other: GenerationRequest) -> bool:
        """Whether a new request takes the slot of a waiting one."""
        if message.tenant == other.tenant:
            return message.priority < other.priority
        return self.waiting.burden(other) > self.waiting.burden(message, 1)

    def admit(self) -> list[LiveRequest]:
        """Admit waiting requests while there is room. Returns those admitted for the first time, unknown to drafters."""
        new: list[LiveRequest] = []
        self._full = False
        if not self.waiting:
            return new
        self.waiting.count(self.running.values())
        while heads := self.waiting.heads:
            request = heads[0]
            if len(self.running) >= self._config.max_num_seqs and not self._give_way():
                break
            rows = request.rows_wanted
            # What is in the cache has no logits any more: a prompt that is scored is computed from its beginning.
            shared = None if request.scores.wanted else request.tenant
            prefix = Prefix(
                tokens=request.tokens, tenant=shared, salt=request.message.cache_salt, adapter=request.message.adapter
            )
            params, prompt_length = request.message.sampling, len(request.message.prompt)
            sampling = Sampling(params=params, prompt_length=prompt_length, rule=request.rule)
            try:
                spare = self._config.headroom * len(self.running)
                opened = self._target.open(request.id, rows, prefix, sampling=sampling, spare=spare)
            except Exception:
                log.exception("making room for request %s failed", request.id)
                self._end(request, Internal("the request could not be admitted; the server's log says why"))
                continue
            if not opened and self.running:
                if self._give_way():
                    continue
                self._full = True
                break
            if not opened:
                # Nothing else is running, so the whole pool is too small for this request.
                most = "small enough for the key-value cache"
                self._end(request, InvalidArgument("max_tokens", request.message.sampling.max_tokens, most))
                continue
            self.waiting.remove(request)
            request.computed, request.room = self._target.computed(request.id), rows
            self._stats.prompt_tokens += len(request.tokens)
            self._stats.prompt_tokens_cached += request.computed
            self.running[request.id] = request
            self.waiting.begun(request)
            self._slots.taken(request.id)
            if not request.admitted:
                request.admitted = True
                request.queue_s = now() - request.submitted_at
                request.cached = request.computed
                new.append(request)
        return new

    def _give_way(self) -> bool:
        """Preempt a request for the one whose turn it is, if it owes that to its tenant; False: none does."""
        owing = self.waiting.debtor([request for request in self.running.values() if not request.in_pass])
        if owing is not None:
            self._preempt(owing, "it is another tenant's turn")
        return owing is not None

    def make_room(self, requests: list[LiveRequest], *, wait: bool) -> list[LiveRequest]:
        """Get memory for the next pass of ``requests``, preempting others if needed. Returns those that have it.

        Args:
            wait: whether passes are under way that may free memory when they end.
        """
        fitting: list[LiveRequest] = []
        for request in requests:
            if request.rows_wanted <= request.room and request.id in self.running:
                fitting.append(request)
                continue
            while request.id in self.running:
                if self._grow(request):
                    fitting.append(request)
                    break
                last = next(other for other in reversed(self.running.values()) if not other.in_pass)
                if last is request and len(self.running) == 1:
                    self._end(request, ResourceExhausted("the key-value cache is too small for the request"))
                elif last is request and wait:
                    break
                else:
                    self._preempt(last, "the cache is full")
        # Later ones may have taken the place of earlier ones.
        return [request for request in fitting if request.id in self.running]

    def _grow(self, request: LiveRequest) -> bool:
        """Make room for the next pass; False if there is none.

        A target that raises ends the request. The result is then True, because an ended request needs no room.
        """
        try:
            request.room = self._target.grow(request.id, request.rows_wanted) or request.room
            return request.rows_wanted <= request.room
        except Exception:
            log.exception("making room for request %s failed", request.id)
            self._end(request, Internal("the request could not go on; the server's log says why"))
            return True

    def left(self) -> list[LiveRequest]:
        """Requests to release: failed here, waiting for too long, or left by their consumers and in no pass."""
        self._end_late()
        ended, self._ended = self._ended, []
        return ended + [request for request in self.running.values() if request.closed and not request.in_pass]

    def _end_late(self) -> None:
        """Refuse those that have waited for too long, the last to come first: the others' waits are shorter without it."""
        most_s = self._config.max_wait_s
        if most_s is None:
            return
        for request in reversed(list(self.waiting)):
            if not request.begun and now() - request.submitted_at > most_s:
                self.waiting.remove(request)
                wait_s = self._wait_s(request.message)
                told = f"it has waited for {most_s:g} s (max_wait_s)"
                self._end(request, ResourceExhausted(told, max(wait_s - most_s, self._expected_s(0)) or _UNKNOWN_S))

    def _look_later(self) -> None:
        """Refuse the next one in time even if no step is taken then: in a pause, or while the target is rebuilt."""
        most_s = self._config.max_wait_s
        self._looking = None
        if most_s is not None and (since := [request.submitted_at for request in self.waiting if not request.begun]):
            after_s = max(0.0, min(since) + most_s - now()) + _LATE_S
            self._looking = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        self._end_late()
        self._look_later()

    def admitted(self) -> list[LiveRequest]:
        """Requests known to drafters: running or preempted."""
        return [*self.running.values(), *(request for request in self.waiting if request.admitted)]

    def find(self, request_id: str) -> LiveRequest | None:
        """The admitted request with this id, if there is one."""
        found = self.running.get(request_id)
        return found or next((request for request in self.admitted() if request.id == request_id), None)

    def forget(self, request: LiveRequest) -> None:
        """Remove an ended request."""
        if self.running.pop(request.id, None) is not None:
            self.waiting.count((request,))
        self.waiting.ended(request)
        self._slots.ended(request.id)
        if request in self.waiting:
            self.waiting.remove(request)

    def _end(self, request: LiveRequest, error: OutriderError) -> None:
        """Fail a request. The loop frees what it holds when it asks for ``left``."""
        self.forget(request)
        request.fail(error)
        self._ended.append(request)

    def _preempt(self, request: LiveRequest, why: str) -> None:
        log.info("request %s is preempted after %d tokens: %s", request.id, len(request.tokens), why)
        self._stats.preemptions += 1
        # Before it is forgotten what was computed of it.
        self.waiting.count((request,))
        self._target.close(request.id)
        request.computed = request.room = 0
        del self.running[request.id]
        self._slots.given_up(request.id)
        if request.closed:
            self._ended.append(request)
        else:
            self.waiting.appendleft(request)
