"""The gate in front of the router: who calls, may they, and is there room within their limits.

The public servers, gRPC and HTTP, share one gate, so that a key's limits count for both together::

    caller = gate.caller(key, address)
    async with gate.admit(caller, request) as visit:
        async for event in router.generate(visit.request):
            visit.note(event)
            ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from services.access.audit import AuditLog
from services.access.charges import charge_of, estimate, tokens_of, within
from services.access.key_records import SCOPES, KeyRecord, hash_key, plain_record
from services.access.key_ring import KeyRing
from services.access.key_use import KeyUse
from services.api.messages import ClientRequest, Completion, TextChunk
from services.metrics.registry import DROPPED, Metrics
from services.statuses import outcome_of
from speculation.errors import OutriderError, PermissionDenied, Unauthenticated

_NO_KEY = KeyRecord(hash="", id="", tenant="", scopes=frozenset(SCOPES))


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        limits: the record of its key.
        address: where the call comes from, for the audit log.
    """

    limits: KeyRecord
    address: str = ""

    @property
    def key_id(self) -> str:
        """The name of its key; empty where the server asks for none."""
        return self.limits.id

    @property
    def tenant(self) -> str:
        """Whose requests these are. No caller can claim to be another: it follows from the key."""
        return self.limits.tenant

    @property
    def scopes(self) -> frozenset[str]:
        """What it may do."""
        return self.limits.scopes


class Visit:
    """One admitted request.

    Attributes:
        request: what to ask the router: the caller's request, with its tenant, weight and longest answer.
        prompt_tokens: an estimate, until the completion says.
        completion_tokens: tokens of the answer that have come.
        strategy, model: those of the answer, once they are known.
        seconds_saved: by which drafting made the answer come sooner; None until it has ended, 0 of a private one.
    """

    def __init__(self, request: ClientRequest, prompt_tokens: int) -> None:
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.strategy = request.strategy
        self.model = request.model
        self.seconds_saved: float | None = None
        self.finished = False

    def note(self, event: TextChunk | Completion) -> None:
        """Count a piece of the answer. What was not used of the tokens charged is given back at the end."""
        if isinstance(event, Completion):
            self.prompt_tokens, self.strategy = len(event.prompt_token_ids), event.strategy
            self.model, self.seconds_saved = event.model, round(event.stats.seconds_saved, 3)
            self.completion_tokens, self.finished = event.completion_tokens, True
        else:
            self.completion_tokens = len(event.token_ids) + (0 if event.restarted else self.completion_tokens)

    def told(self) -> dict[str, object]:
        """What the audit log says of it."""
        return {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "strategy": self.strategy,
            "seconds_saved": self.seconds_saved,
        }


class Slots:
    """A key's room for the answers to one request, from before its prompts are read until the last answer has ended.

    Args:
        charged: tokens that have been charged for all of the answers together, by estimate.
    """

    def __init__(self, gate: Gate, caller: Caller, use: KeyUse, method: str, answers: int, charged: int) -> None:
        self._gate = gate
        self._caller = caller
        self._use = use
        self._method = method
        # Slots that no answer has taken yet, and the tokens charged for them.
        self._free = answers
        self._charged = charged
        self.begun = False

    def charge(self, requests: Sequence[ClientRequest]) -> None:
        """Correct what has been charged, now that the prompts' tokens are known: one request for each answer.

        Raises:
            InvalidArgument: the key's limits can never allow the requests; names the field.
            ResourceExhausted: the key has not so many tokens left; says when to try again.
        """
        record = self._caller.limits
        more = tokens_of(record, [within(record, request) for request in requests]) - self._charged
        if more > 0:
            self._use.charge(more)
        else:
            self._use.give_back(-more)
        self._charged += more

    @asynccontextmanager
    async def admit(self, request: ClientRequest) -> AsyncIterator[Visit]:
        """An answer's time at the router, in one of the slots. Its end is recorded, and what was not used given back."""
        visit = Visit(within(self._caller.limits, request), estimate(request))
        charged = charge_of(visit.request, visit.prompt_tokens)
        self._free -= 1
        self._charged -= charged
        self.begun = True
        refused = False
        try:
            with self._gate.recorded(self._caller, self._method, request.request_id, visit):
                yield visit
        except OutriderError:
            refused = visit.completion_tokens == 0
            raise
        finally:
            self._use.leave()
            # A refused request has used nothing; one that was left may have used its whole prompt.
            self._use.give_back(charged - (0 if refused else visit.prompt_tokens + visit.completion_tokens))

    def close(self) -> None:
        """Give back the slots that no answer has taken."""
        for _ in range(self._free):
            self._use.leave()
        self._use.give_back(self._charged)


class Gate:
    """Decides who may call.

    Args:
        keys: the valid keys.
        audit: where calls are recorded.
        metrics: where refusals are counted.
        clock: seconds, never going back; limits go by it.
        now: seconds since 1970; expiry goes by it.
    """

    def __init__(
        self,
        keys: KeyRing,
        audit: AuditLog | None = None,
        metrics: Metrics = DROPPED,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._audit = audit or AuditLog()
        self._refused = metrics.counter("auth_failures_total")
        self._limited = metrics.counter("rate_limited_total")
        self._clock = clock
        self._now = now
        self._requests = metrics.counter("requests_total")
        self._uses: dict[str, KeyUse] = {}
        keys.tell_reload = lambda outcome, valid: self._audit.write(method="reload_keys", outcome=outcome, keys=valid)

    def caller(self, key: str | None, address: str = "") -> Caller:
        """Who calls with ``key``.

        Raises:
            Unauthenticated: there is no such key, or it has expired; the audit log says so.
        """
        if self._keys.open:
            # A service without keys has one user; a key that is sent all the same sets its requests apart.
            return Caller(
                limits=replace(_NO_KEY, tenant=plain_record(hash_key(key)).tenant) if key else _NO_KEY, address=address
            )
        record = self._keys.find(key) if key else None
        if record is None:
            self._refuse("no key" if not key else "unknown key", "", address)
            raise Unauthenticated("no valid API key: send 'authorization: Bearer KEY'")
        if record.expires is not None and datetime.fromtimestamp(self._now(), UTC) >= record.expires:
            self._refuse("expired key", record.id, address)
            raise Unauthenticated(f"the API key {record.id} has expired ({record.expires.isoformat()})")
        return Caller(limits=record, address=address)

    @asynccontextmanager
    async def admit(self, caller: Caller, request: ClientRequest) -> AsyncIterator[Visit]:
        """A request's time at the router. It counts towards the key's limits, and its end is recorded.

        The prompt's tokens, as far as they can be told yet, and max_tokens are charged at once; what was not used is given
        back at the end.

        Raises:
            PermissionDenied: the key may not generate.
            InvalidArgument: the key's limits can never allow the request; names the field.
            ResourceExhausted: a limit is reached; says when to try again.
        """
        async with self.hold(caller, [request], method="Generate") as slots, slots.admit(request) as visit:
            yield visit

    @asynccontextmanager
    async def hold(
        self, caller: Caller, requests: Sequence[ClientRequest], *, method: str, counted_as: str = "n"
    ) -> AsyncIterator[Slots]:
        """Room for all answers to a request, before its prompts are read: who may not ask costs no more than the question.

        A request that fails before its first answer begins is recorded here, and counted if it had its slots.

        Args:
            requests: one for each answer; a lower bound of ``max_tokens`` will do until ``Slots.charge``.
            counted_as: the field of the request that says how many answers there are.

        Raises:
            OutriderError: as ``admit``.
        """
        first = requests[0]
        visit = Visit(first, estimate(first))
        slots: Slots | None = None
        with self.recorded(caller, method, first.request_id, visit, unless=lambda: slots is not None and slots.begun):
            self.require(caller, "generate")
            allowed = [within(caller.limits, request) for request in requests]
            tokens, use = tokens_of(caller.limits, allowed), self._use(caller.limits)
            use.enter(len(requests), tokens, counted_as=counted_as)
            slots = Slots(self, caller, use, method, len(requests), tokens)
            try:
                yield slots
            except BaseException as error:
                if not slots.begun:
                    self._requests.add(1, *outcome_of(error))
                raise
            finally:
                slots.close()

    def arriving(self, caller: Caller) -> AbstractContextManager[None]:
        """A call whose content arrives. A key has no more of them than it may have requests at once.

        Raises:
            ResourceExhausted: when it is entered: that limit is reached.
        """
        return self._use(caller.limits).arriving()

    @contextmanager
    def counted(self, caller: Caller, method: str, request_id: str = "", *, scope: str | None = None) -> Iterator[None]:
        """A recorded call which counts as one of its key's requests, and writes no tokens.

        Args:
            scope: what the key must be allowed; None: nothing.

        Raises:
            PermissionDenied: the key has not the scope.
            ResourceExhausted: a limit is reached; says when to try again.
        """
        with self.recorded(caller, method, request_id):
            if scope is not None:
                self.require(caller, scope)
            use = self._use(caller.limits)
            use.enter(1, 0, counted_as="request")
            try:
                yield
            finally:
                use.leave()

    @contextmanager
    def recorded(
        self,
        caller: Caller,
        method: str,
        request_id: str = "",
        visit: Visit | None = None,
        unless: Callable[[], bool] = lambda: False,
    ) -> Iterator[None]:
        """A call that the audit log names when it ends, with how it ended; but not if ``unless`` is true then."""
        outcome = "ok"
        try:
            yield
            if visit is not None and not visit.finished:
                outcome = "left"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            if not unless():
                self._audit.write(
                    request_id=request_id,
                    key_id=caller.key_id,
                    tenant=caller.tenant,
                    method=method,
                    outcome=outcome,
                    address=caller.address,
                    **({} if visit is None else visit.told()),
                )

    def require(self, caller: Caller, scope: str) -> None:
        """Check that a caller's key has a scope.

        Raises:
            PermissionDenied: it has not.
        """
        if scope not in caller.scopes:
            allowed = ", ".join(sorted(caller.scopes)) or "nothing"
            raise PermissionDenied(f"the API key {caller.key_id} may not {scope}: its scopes are {allowed}")

    def rates(self, caller: Caller) -> dict[str, str]:
        """What is left of the key's rates, as headers that OpenAI's clients read, such as x-ratelimit-limit-requests."""
        use = self._uses.get(caller.key_id)
        return (use if use is not None and caller.key_id else self._new_use(caller.limits)).rates()

    def _use(self, record: KeyRecord) -> KeyUse:
        """What the key uses, by the limits that it has now."""
        if not record.id:
            return self._new_use(record)
        use = self._uses.setdefault(record.id, self._new_use(record))
        use.follow(record)
        return use

    def _new_use(self, record: KeyRecord) -> KeyUse:
        return KeyUse(record, self._clock, self._limited)

    def close(self) -> None:
        """Close the audit log."""
        self._audit.close()

    def _refuse(self, why: str, key_id: str, address: str) -> None:
        self._refused.add(1, why.replace(" ", "_"))
        self._audit.write(key_id=key_id, method="authenticate", outcome=why, address=address)


def open_gate(
    hashes: Iterable[str] = (),
    keys_file: Path | None = None,
    audit_log: str | None = None,
    metrics: Metrics = DROPPED,
) -> Gate:
    """The gate of a server's settings.

    Raises:
        ConfigurationError: the keys file or the audit log cannot be used.
    """
    return Gate(KeyRing(hashes, keys_file), AuditLog(audit_log), metrics)
