"""Responses that are kept in Redis, where all routers of a service reach them.

Keys of a tenant, whose name stands in none (the braces keep them in one slot of a cluster)::

    outrider:responses:{HASH}:of:ID     a response: SHA-256 of all that follows and of this key, size of the JSON of the
                                        response, that JSON, the JSON of its context
    outrider:responses:{HASH}:ends      when each response ends, in milliseconds, as a sorted set of ID:SIZE
    outrider:responses:{HASH}:bytes     the sizes together

All of them end by themselves. What is read is checked: what is damaged, or stands under another key, is not there.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Awaitable
from typing import Any, cast

import redis
import redis.asyncio
from redis.commands.core import AsyncScript

from services.api.config import StoredResponses
from services.api.http.responses.stored_responses import StoredResponse
from services.redis_client import redis_at
from speculation.errors import Unavailable

log = logging.getLogger(__name__)

_ID = re.compile(r"resp_[0-9a-f]{1,64}")
_DIGEST, _SIZE = 32, 8
# What the user of Redis must be allowed to do.
COMMANDS = (
    "get", "set", "del", "strlen", "time", "incrby", "decrby", "pexpire", "zadd", "zrem", "zcard", "zrange", "zrangebyscore",
    "eval", "evalsha", "script|load",
)  # fmt: skip
# Each script runs as a whole: two routers that store at once see each other's bytes.
_BEGIN = """
local ends, total, prefix = KEYS[1], KEYS[2], ARGV[1]
local function drop(member)
    local id, size = string.match(member, '^(.*):(%d+)$')
    redis.call('ZREM', ends, member)
    redis.call('DECRBY', total, size)
    return redis.call('DEL', prefix .. id)
end
local function drop_one(id)
    local size = redis.call('STRLEN', prefix .. id)
    return size == 0 and 0 or drop(id .. ':' .. size)
end
"""
_PUT = (
    _BEGIN
    + """
local id, blob, age, most, bytes = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', now)) do drop(member) end
drop_one(id)
redis.call('SET', prefix .. id, blob, 'PX', age)
redis.call('ZADD', ends, now + age, id .. ':' .. #blob)
local size = redis.call('INCRBY', total, #blob)
local count = redis.call('ZCARD', ends)
while count > 1 and (size > bytes or count > most) do
    drop(redis.call('ZRANGE', ends, 0, 0)[1])
    size = tonumber(redis.call('GET', total))
    count = count - 1
end
-- A server that runs out of memory may have thrown one of the keys out, and the sum is wrong.
if count == 1 then redis.call('SET', total, #blob) end
redis.call('PEXPIRE', ends, age)
redis.call('PEXPIRE', total, age)
"""
)
_DELETE = _BEGIN + "return drop_one(ARGV[2])"
_FORGET = (
    _BEGIN
    + """
for _, member in ipairs(redis.call('ZRANGE', ends, 0, -1)) do drop(member) end
redis.call('DEL', ends, total)
"""
)


class ResponsesInRedis:
    """Implements ``ResponseStore`` in Redis. The bounds hold for each tenant; Redis' own bound all of them.

    Args:
        bounds: with ``redis_url``.

    Raises:
        ConfigurationError: the URL is malformed.
    """

    def __init__(self, bounds: StoredResponses) -> None:
        self._bounds = bounds
        self._redis = redis_at(bounds.redis_url or "", bounds.redis_password, field="server.stored_responses_redis_url")
        self._put, self._delete, self._forget = map(self._redis.register_script, (_PUT, _DELETE, _FORGET))

    async def put(self, tenant: str, name: str, stored: StoredResponse) -> bool:
        prefix = _prefix(tenant)
        body = len(stored.response).to_bytes(_SIZE, "big") + stored.response + stored.context
        blob = _digest(prefix + name, body) + body
        if len(blob) > self._bounds.bytes:
            return False
        age_ms = max(1, round(self._bounds.age_s * 1000))
        await self._run(self._put, prefix, name, blob, age_ms, self._bounds.most, self._bounds.bytes)
        return True

    async def get(self, tenant: str, name: str) -> StoredResponse | None:
        if not _ID.fullmatch(name):
            return None
        key = _prefix(tenant) + name
        blob: bytes | None = await self._answered(self._redis.get(key))
        if blob is None:
            return None
        digest, body = blob[:_DIGEST], blob[_DIGEST:]
        if digest != _digest(key, body):
            log.error("a response that is stored in Redis is damaged, and taken to be gone")
            return None
        end = _SIZE + int.from_bytes(body[:_SIZE], "big")
        return StoredResponse(response=body[_SIZE:end], context=body[end:])

    async def delete(self, tenant: str, name: str) -> bool:
        return bool(_ID.fullmatch(name)) and bool(await self._run(self._delete, _prefix(tenant), name))

    async def forget(self, tenant: str) -> None:
        await self._run(self._forget, _prefix(tenant))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: AsyncScript, prefix: str, *values: str | bytes | float) -> Any:
        keys = [prefix.removesuffix("of:") + name for name in ("ends", "bytes")]
        return await self._answered(script(keys=keys, args=[prefix, *values]))

    async def _answered(self, answer: Any) -> Any:
        """Redis' answer.

        Raises:
            Unavailable: it gives none.
        """
        try:
            return await cast(Awaitable[Any], answer)
        except (redis.RedisError, OSError) as error:
            # Its words may hold addresses, which are no business of clients.
            log.warning("Redis, where responses are stored, does not answer: %s", error)
            raise Unavailable("stored responses cannot be reached; try again") from error


def _prefix(tenant: str) -> str:
    return f"outrider:responses:{{{hashlib.sha256(tenant.encode()).hexdigest()[:32]}}}:of:"


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + body).digest()
