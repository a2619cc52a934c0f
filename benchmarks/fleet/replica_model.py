"""One verifier on a simulated clock, as a fluid: between two events all its requests advance at even rates.

Steps take milliseconds and a day has millions of them, so single steps are not simulated. What a step holds and how long it
takes comes from ``StepPace``. Prompts are read one after the other, in chunks that the budget allows beside decoding.
A request is admitted once a slot is free and the pool holds its prompt and its whole answer, so nobody is preempted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from benchmarks.fleet.step_pace import StepPace

# Tokens that rounding of times may leave.
_NOTHING = 1e-4


@dataclass(slots=True)
class Job:
    """A request at a verifier.

    Attributes:
        number: of its arrival.
        prompt: tokens before the answer's next one; grows when it moves to another verifier.
        answer: tokens that are still to come.
        first: whether it has had its first token.
        failed: verifiers in a row that ended under it, the last ones without giving it a token.
        attempt: verifiers that it has been sent to before.
        tries: how often in a row there was no verifier to send it to.
    """

    number: int
    conversation: int
    prompt: int
    answer: int
    first: bool = False
    failed: int = 0
    attempt: int = 0
    tries: int = 0


class ReplicaModel:
    """A verifier's requests. Times are seconds and never go back.

    Attributes:
        name: on the ring.
        next_s: when something happens in it by itself; infinite if it is idle.
        load: requests in it, those that wait too.
    """

    def __init__(self, name: str, pace: StepPace, max_waiting: int, pool: int, gpus: int, now: float) -> None:
        self.name = name
        self._steps, self._pool, self._gpus = pace.steps, pool, gpus
        self._slots, self._most_waiting = len(pace.steps) - 1, max_waiting
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        self._unread = 0.0
        # Tokens that a request would have got that had been decoded all the time, and who ends at which of them.
        self._clock = 0.0
        self._decoding: list[tuple[float, int, Job]] = []
        self._reserved = 0
        self._keys = 0.0
        # Tokens of conversations that are still in the pool, the one used last at the end.
        self._cached: OrderedDict[int, int] = OrderedDict()
        self._cached_tokens = 0
        self._now = now
        self._reads_per_s = self._tokens_per_s = 0.0
        self.next_s = float("inf")
        self.load = 0

    @property
    def full(self) -> bool:
        """Whether it would refuse a request."""
        return len(self._waiting) >= self._most_waiting and (bool(self._waiting) or self.load >= self._slots)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    def reported(self, now: float) -> dict[str, float]:
        """As ``VerifierDeployment.record_autoscaling_stats``."""
        self._advance(now)
        running = len(self._decoding) + len(self._reading)
        return {"rows": running / self._slots, "waiting": len(self._waiting), "cache": min(1.0, self._keys / self._pool)}

    def take(self, now: float, job: Job) -> None:
        """Take a request in; it must not be ``full``."""
        self._advance(now)
        self.load += 1
        self._waiting.append(job)
        self._admit()
        self._plan()

    def step(self, now: float) -> tuple[Job | None, Job | None]:
        """What happens at ``next_s``: who gets its first token here, and whose answer ends (perhaps the same one)."""
        self._advance(now)
        began = ended = None
        if self._reading and self._unread <= _NOTHING:
            began = self._reading.popleft()
            heappush(self._decoding, (self._clock + began.answer - 1, began.number, began))
            if self._reading:
                self._unread = self._uncached(self._reading[0])
        if self._decoding and self._decoding[0][0] <= self._clock + _NOTHING:
            ended = heappop(self._decoding)[2]
            held = ended.prompt + ended.answer
            self._reserved -= held
            self._keys -= held
            self.load -= 1
            if not self.load:
                self._keys = 0.0
            self._remember(ended.conversation, held)
            self._admit()
        self._plan()
        return began, ended

    def empty(self, now: float) -> list[Job]:
        """It ends: take all requests out, each with what it still lacks, the ones that came first at the front."""
        self._advance(now)
        moved = []
        for ends, _, job in self._decoding:
            left = min(job.answer, max(1, round(ends - self._clock)))
            moved.append(Job(job.number, job.conversation, job.prompt + job.answer - left, left, True, 1, job.attempt + 1))
        for job in (*self._reading, *self._waiting):
            job.failed += 1
            job.attempt += 1
            moved.append(job)
        self._decoding, self.load, self.next_s = [], 0, float("inf")
        self._reading.clear()
        self._waiting.clear()
        return sorted(moved, key=lambda job: job.number)

    def _advance(self, now: float) -> None:
        passed = now - self._now
        self._now = now
        if passed <= 0:
            return
        self._clock += passed * self._tokens_per_s
        self._keys += passed * (len(self._decoding) * self._tokens_per_s)
        if self._reading:
            self._unread = max(0.0, self._unread - passed * self._reads_per_s)

    def _admit(self) -> None:
        waiting = self._waiting
        while waiting and len(self._decoding) + len(self._reading) < self._slots:
            job = waiting[0]
            held = job.prompt + job.answer
            if self._reserved and self._reserved + held > self._pool:
                return
            waiting.popleft()
            self._reserved += held
            self._keys += job.prompt + 1
            self._forget_beyond(self._pool - self._reserved)
            self._reading.append(job)
            if len(self._reading) == 1:
                self._unread = self._uncached(job)

    def _plan(self) -> None:
        """Set the rates that hold until something happens, and when that is."""
        count = len(self._decoding)
        step = self._steps[count]
        seconds = step.base_s + step.key_s * self._keys / self._gpus
        next_s = float("inf")
        if self._reading:
            seconds += step.prompt_s
            self._reads_per_s = self._gpus * step.prompt_rows / seconds
            next_s = self._now + self._unread / self._reads_per_s
        self._tokens_per_s = step.tokens / seconds if count else 0.0
        if count:
            next_s = min(next_s, self._now + (self._decoding[0][0] - self._clock) / self._tokens_per_s)
        self.next_s = max(self._now, next_s)

    def _uncached(self, job: Job) -> float:
        held = self._cached.pop(job.conversation, 0)
        self._cached_tokens -= held
        # The last token is computed anyway.
        return float(max(1, job.prompt - held))

    def _remember(self, conversation: int, tokens: int) -> None:
        self._cached_tokens += tokens - self._cached.pop(conversation, 0)
        self._cached[conversation] = tokens
        self._forget_beyond(self._pool - self._reserved)

    def _forget_beyond(self, room: int) -> None:
        while self._cached_tokens > max(0, room):
            self._cached_tokens -= self._cached.popitem(last=False)[1]
