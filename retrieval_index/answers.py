"""Tenants' earlier answers in Redis: bounded, deleted by age and on request, and read by all drafters of a service.

Keys of the index ``name``; TENANT is a hash of the tenant, the model's tokenizer and the secret::

    outrider:{name}:answers:TENANT       stream of answers: "tokens", sealed; "total", the number of tokens up to its end;
                                         "size", its own; "drafter", who kept it
    outrider:{name}:generation:TENANT    a random number, another one each time that the tenant is forgotten

A request's answer is kept only under the generation that was there when it began. So none comes back after a ``forget``,
whichever drafter it runs at. Times are those of Redis, since clocks of other machines may differ. What is read is untrusted:
an entry that was not written here is left out.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio
from redis.asyncio.client import Pipeline

from retrieval_index.access import without_password
from retrieval_index.redis_errors import speaking
from retrieval_index.sealed_answers import Sealing
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument, Unavailable
from speculation.messages import RecalledAnswers

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
# Of the oldest answers, how many may be deleted when one is added; and how many are read at once.
_DELETED, _READ = 8, 64
# A drafter may write while another does.
_TRIES = 8
# A generation outlives the last answer of it by this time: a longer request is not kept.
_LONGEST_REQUEST_S = 3600.0
_PLACE = re.compile(r"\d{1,19}-\d{1,19}")
# Of how an answer is written.
_VERSION = "1"

_Entry = tuple[bytes, Mapping[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class _Keys:
    answers: str
    generation: str


class RedisAnswers:
    """Implements ``speculation.ports.AnswerStore``.

    Args:
        url, name, password: as of ``retrieval_index.store.IndexStore``.
        tokenizer: hash of the model's tokenizer: answers of another one are others' answers.
        max_tokens: of one tenant's answers; beyond it the oldest are deleted.
        kept_s: seconds after which an answer is deleted.
        secret: encrypts answers; None: they are in clear.

    Raises:
        ConfigurationError: the URL is malformed.
    """

    def __init__(
        self,
        url: str,
        name: str,
        password: str | None = None,
        *,
        tokenizer: str,
        max_tokens: int,
        kept_s: float,
        secret: str | None = None,
    ) -> None:
        self._origin = without_password(url)
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url, password=password, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S
            )
        except ValueError:
            # redis-py's own message may contain the password.
            raise ConfigurationError("not a Redis URL; give redis://USER:PASSWORD@HOST:PORT", field=self._origin) from None
        self._name, self._tokenizer = name, tokenizer
        self._max_tokens, self._kept_ms = max_tokens, round(1000 * kept_s)
        self._sealing = Sealing(secret)
        self.damaged = 0

    async def recall(self, tenant: str, after: str, drafter: str) -> RecalledAnswers:
        if after and not _PLACE.fullmatch(after):
            raise InvalidArgument("after", repr(after[:40]), "`last` of an earlier answer, or empty")
        keys = self._keys(tenant)
        with speaking(self._origin):
            generation = await self._generation(keys)
            oldest = await self._oldest_allowed()
            begin = f"({after}" if after and int(after.partition("-")[0]) >= oldest else f"{oldest}-0"
            found = cast(list[_Entry], await self._redis.xrange(keys.answers, min=begin, count=_READ))
        answers: list[tuple[int, ...]] = []
        read, last = 0, after
        for place, fields in found:
            if fields.get(b"drafter") != drafter.encode() and (tokens := self._read(fields, keys)):
                if read + len(tokens) > limits.MAX_RECALLED:
                    return RecalledAnswers(generation=generation, answers=tuple(answers), last=last, more=True)
                answers.append(tokens)
                read += len(tokens)
            last = place.decode()
        return RecalledAnswers(generation=generation, answers=tuple(answers), last=last, more=len(found) == _READ)

    async def keep(self, tenant: str, generation: int, drafter: str, tokens: Sequence[int]) -> bool:
        keys, kept = self._keys(tenant), tokens[-min(self._max_tokens, limits.MAX_KEPT_ANSWER) :]
        sealed = self._sealing.seal(kept, keys.answers)
        with speaking(self._origin):
            for _ in range(_TRIES):
                async with self._redis.pipeline(transaction=True) as together:
                    try:
                        await together.watch(keys.generation, keys.answers)
                        if await together.get(keys.generation) != str(generation).encode():
                            return False
                        total = await self._total(together, keys) + len(kept)
                        gone = await self._too_many(together, keys, total)
                        entry = {"tokens": sealed, "total": total, "size": len(kept), "drafter": drafter}
                        together.multi()  # type: ignore[no-untyped-call]
                        together.xadd(keys.answers, cast(Any, entry))
                        if gone:
                            together.xdel(keys.answers, *gone)
                        self._live_on(together, keys)
                        await together.execute()
                        return True
                    except redis.exceptions.WatchError:
                        continue
        raise Unavailable(f"{self._origin}: others write the answers of one tenant all the time")

    async def forget(self, tenant: str) -> None:
        keys = self._keys(tenant)
        with speaking(self._origin):
            async with self._redis.pipeline(transaction=True) as together:
                together.delete(keys.generation)
                together.delete(keys.answers)
                await together.execute()

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _generation(self, keys: _Keys) -> int:
        fresh = str(secrets.randbits(63)).encode()
        life = self._kept_ms + round(1000 * _LONGEST_REQUEST_S)
        before = cast(bytes | None, await self._redis.set(keys.generation, fresh, nx=True, get=True, px=life))
        text = fresh if before is None else before
        if not text.isdigit() or int(text) > limits.MAX_UINT64:
            await self._redis.delete(keys.generation, keys.answers)
            raise Unavailable(f"{self._origin}: what was kept of a tenant's answers was not written here")
        if before is not None:
            await self._redis.pexpire(keys.generation, life)
        return int(text)

    async def _oldest_allowed(self) -> int:
        """The time in ms before which answers are too old."""
        seconds, microseconds = await self._redis.time()
        return max(0, 1000 * seconds + microseconds // 1000 - self._kept_ms)

    async def _total(self, together: Pipeline, keys: _Keys) -> int:
        latest = cast(list[_Entry], await together.xrevrange(keys.answers, count=1))
        return _number(latest[0][1], b"total") if latest else 0

    async def _too_many(self, together: Pipeline, keys: _Keys, total: int) -> list[bytes]:
        """Places of the oldest answers that an answer at whose end there are ``total`` tokens leaves no room for."""
        oldest_allowed = await self._oldest_allowed()
        oldest = cast(list[_Entry], await together.xrange(keys.answers, count=_DELETED))
        return [
            place
            for place, fields in oldest
            if total - _number(fields, b"total") + _number(fields, b"size") > self._max_tokens
            or int(place.partition(b"-")[0]) < oldest_allowed
        ]

    def _live_on(self, together: Pipeline, keys: _Keys) -> None:
        together.pexpire(keys.answers, self._kept_ms)
        together.pexpire(keys.generation, self._kept_ms + round(1000 * _LONGEST_REQUEST_S))

    def _read(self, fields: Mapping[bytes, bytes], keys: _Keys) -> tuple[int, ...]:
        """An entry's tokens; none where it was not written here."""
        try:
            return self._sealing.unseal(fields.get(b"tokens", b""), keys.answers)[: limits.MAX_KEPT_ANSWER]
        except ValueError as error:
            if not self.damaged:
                log.warning("kept answers are left out: %s. Is retrieval.answers_key the same everywhere?", error)
            self.damaged += 1
            return ()

    def _keys(self, tenant: str) -> _Keys:
        named = self._sealing.name(_VERSION, self._tokenizer, tenant)
        return _Keys(*(f"outrider:{{{self._name}}}:{kind}:{named}" for kind in ("answers", "generation")))


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int:
    """A field that holds a number; 0 where it was not written here."""
    text = fields.get(name, b"")
    return int(text) if text.isdigit() and len(text) < 19 else 0
