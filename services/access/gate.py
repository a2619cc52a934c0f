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
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from services.access.audit import AuditLog
from services.access.key_hash import hash_key
from services.access.key_records import SCOPES, KeyRecord, plain_record
from services.access.key_ring import KeyRing
from services.access.token_bucket import TokenBucket
from services.client_api import ChatMessage, ClientRequest, Completion, TextChunk
from services.metrics.registry import DROPPED, Metrics
from speculation.errors import InvalidArgument, OutriderError, PermissionDenied, ResourceExhausted, Unauthenticated
from speculation.types import DEFAULT_MAX_TOKENS

# Characters of an average token, until the tokeniser has counted them.
_CHARACTERS_PER_TOKEN = 4
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
        strategy: that of the answer, once it is known.
    """

    def __init__(self, request: ClientRequest, prompt_tokens: int) -> None:
        self.request = request
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.strategy = request.strategy
        self.finished = False

    def note(self, event: TextChunk | Completion) -> None:
        """Count a piece of the answer. What was not used of the tokens charged is given back at the end."""
        if isinstance(event, Completion):
            self.prompt_tokens, self.strategy = len(event.prompt_token_ids), event.strategy
            self.completion_tokens, self.finished = event.completion_tokens, True
        else:
            self.completion_tokens += len(event.token_ids)


class _Use:
    """What one key uses at present."""

    def __init__(self, record: KeyRecord, clock: Callable[[], float]) -> None:
        self.running = 0
        self._clock = clock
        self.buckets: dict[str, TokenBucket] = {}
        self.follow(record)

    def follow(self, record: KeyRecord) -> None:
        """Take over the record's limits, which may have changed."""
        for name, per_minute in (("requests", record.requests_per_minute), ("tokens", record.tokens_per_minute)):
            if per_minute is None:
                self.buckets.pop(name, None)
            elif name in self.buckets:
                self.buckets[name].resize(per_minute)
            else:
                self.buckets[name] = TokenBucket(per_minute, self._clock)

    def settle(self, name: str, units: float) -> None:
        if name in self.buckets:
            self.buckets[name].settle(units)


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
        self._uses: dict[str, _Use] = {}

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
    async def admit(self, caller: Caller, request: ClientRequest, *, method: str = "Generate") -> AsyncIterator[Visit]:
        """A request's time at the router. It counts towards the key's limits, and its end is recorded.

        The prompt's tokens, as far as they can be told yet, and max_tokens are charged at once; what was not used is given
        back at the end.

        Raises:
            PermissionDenied: the key may not generate.
            InvalidArgument: the key's limits can never allow the request; names the field.
            ResourceExhausted: a limit is reached; says when to try again.
        """
        visit = Visit(request, _estimate(request))
        with self.recorded(caller, method, request.request_id, visit), self._seat(caller.limits, visit):
            yield visit

    @contextmanager
    def recorded(self, caller: Caller, method: str, request_id: str = "", visit: Visit | None = None) -> Iterator[None]:
        """A call that the audit log names when it ends, with how it ended."""
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
            used = (
                {}
                if visit is None
                else {
                    "prompt_tokens": visit.prompt_tokens,
                    "completion_tokens": visit.completion_tokens,
                    "strategy": visit.strategy,
                }
            )
            self._audit.write(
                request_id=request_id,
                key_id=caller.key_id,
                tenant=caller.tenant,
                method=method,
                outcome=outcome,
                address=caller.address,
                **used,
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
        if use is None or not caller.key_id:
            use = _Use(caller.limits, self._clock)
        told = {}
        for name, bucket in use.buckets.items():
            told[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            told[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
            told[f"x-ratelimit-reset-{name}"] = f"{bucket.full_in_s:.3f}s"
        return told

    @contextmanager
    def _seat(self, record: KeyRecord, visit: Visit) -> Iterator[None]:
        """Hold a seat among the key's requests."""
        self.require(Caller(limits=record), "generate")
        visit.request = _within(record, visit.request)
        use = self._uses.setdefault(record.id, _Use(record, self._clock)) if record.id else _Use(record, self._clock)
        use.follow(record)
        charged = self._charge(record, use, visit)
        use.running += 1
        refused = False
        try:
            yield
        except OutriderError:
            refused = visit.completion_tokens == 0
            raise
        finally:
            use.running -= 1
            # A refused request has used nothing; one that was left may have used its whole prompt.
            used = 0 if refused else visit.prompt_tokens + visit.completion_tokens
            use.settle("tokens", used - charged)

    def _charge(self, record: KeyRecord, use: _Use, visit: Visit) -> int:
        """Take a request and its tokens from the key's rates. Returns the tokens."""
        if record.max_concurrent is not None and use.running >= record.max_concurrent:
            self._limited.add(1, "max_concurrent")
            raise ResourceExhausted(f"{use.running} requests of this API key run already (max_concurrent)")
        request = visit.request
        most = request.sampling.max_tokens or min(DEFAULT_MAX_TOKENS, request.most_tokens or DEFAULT_MAX_TOKENS)
        tokens = visit.prompt_tokens + most
        if record.tokens_per_minute is not None and tokens > record.tokens_per_minute:
            allowed = f"small enough for this key's {record.tokens_per_minute} tokens_per_minute, with the prompt's tokens"
            raise InvalidArgument("max_tokens", most, allowed)
        for name, units in (("requests", 1), ("tokens", tokens)):
            if name in use.buckets and (wait_s := use.buckets[name].wait_s(units)) > 0:
                self._limited.add(1, f"{name}_per_minute")
                limit = f"{use.buckets[name].per_minute} {name} per minute"
                raise ResourceExhausted(f"this API key's limit of {limit} is reached; try again in {wait_s:.1f} s", wait_s)
        use.settle("requests", 1)
        use.settle("tokens", tokens)
        return tokens

    def _refuse(self, why: str, key_id: str, address: str) -> None:
        self._refused.add(1, why.replace(" ", "_"))
        self._audit.write(key_id=key_id, method="authenticate", outcome=why, address=address)


def _within(record: KeyRecord, request: ClientRequest) -> ClientRequest:
    """The request as the router gets it.

    Raises:
        InvalidArgument: it asks for a longer answer, or for another strategy, than the key may.
    """
    asked = request.sampling.max_tokens
    if asked is not None and record.max_tokens is not None and asked > record.max_tokens:
        raise InvalidArgument("max_tokens", asked, f"at most {record.max_tokens} with this API key")
    if request.strategy is not None and record.strategies is not None and request.strategy not in record.strategies:
        allowed = ", ".join(sorted(record.strategies))
        raise InvalidArgument("speculation.strategy", request.strategy, f"one of {allowed} with this API key")
    return replace(request, tenant=record.tenant, weight=record.weight, most_tokens=record.max_tokens)


def _estimate(request: ClientRequest) -> int:
    """About how many tokens the prompt has; exactly, where it is given in tokens."""
    if isinstance(request.input, str):
        return -(-len(request.input) // _CHARACTERS_PER_TOKEN)
    characters = sum(len(entry.role) + len(entry.content) for entry in request.input if isinstance(entry, ChatMessage))
    ids = sum(1 for entry in request.input if isinstance(entry, int))
    return ids + -(-characters // _CHARACTERS_PER_TOKEN)


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
