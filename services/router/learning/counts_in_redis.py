"""Costs in Redis, where all routers of a service add what they have seen.

Keys, whose names tell neither a tenant nor a model::

    outrider:learning:{SCOPE}:everybody     SHA-256 of the key and the rest, then JSON: by kind and strategy the sums of a
    outrider:learning:{SCOPE}:of:TENANT     ``ComparedCost``

All keys expire. Values are checked when they are read: a damaged one, or one that belongs to another key, counts as absent,
and the next write replaces it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from typing import cast

import redis

from services.redis_client import redis_at
from services.router.learning.compared_cost import NUMBERS, ComparedCost
from services.router.learning.counts import Sheet, add_sheet
from speculation.errors import Unavailable
from speculation.sources import STRATEGIES

log = logging.getLogger(__name__)

_TRIES = 8
# For so long costs outlive the last answer that was added to them.
_KEPT_MS = 30 * 86_400_000
_DIGEST, _MOST_BYTES = 32, 1 << 18
_KIND = re.compile(r"[a-z0-9.]{1,40}")
# What the user of Redis must be allowed to do.
COMMANDS = ("get", "set", "del", "watch", "unwatch", "multi", "exec")


class CountsInRedis:
    """Sheets of costs by tenant, and everybody's, under the tenant None.

    Args:
        url: with the user, where it needs one.
        scope: what the costs are of; others' are apart.
        password: where the URL holds none.

    Attributes:
        damaged: sheets that were not there because they were not written here.

    Raises:
        ConfigurationError: the URL is malformed.
    """

    def __init__(self, url: str, scope: str, password: str | None = None) -> None:
        self._redis = redis_at(url, password, field="router.learning_redis_url")
        self._scope = hashlib.sha256(scope.encode()).hexdigest()[:16]
        self.damaged = 0

    async def add(self, tenant: str | None, more: Sheet, own: Sheet, *, known: bool) -> Sheet | None:
        """Add costs to what is there; all that is there then. None: the tenant was forgotten, and nothing is written.

        Args:
            own: everything that this router has of it, ``more`` included; it stands for what is not there, or damaged.
            known: it was there before, so a tenant's that is not there was forgotten.

        Raises:
            Unavailable: Redis does not answer, or others write all the time.
        """
        key = self._key(tenant)
        try:
            async with self._redis.pipeline(transaction=True) as together:
                for _ in range(_TRIES):
                    try:
                        await together.watch(key)
                        found = cast(bytes | None, await together.get(key))
                        if found is None and known and tenant is not None:
                            return None
                        sheet = None if found is None else self._read(key, found)
                        sheet = add_sheet({}, own) if sheet is None else add_sheet(sheet, more)
                        together.multi()  # type: ignore[no-untyped-call]
                        together.set(key, _written(key, sheet), px=_KEPT_MS)
                        await together.execute()
                        return sheet
                    except redis.exceptions.WatchError:
                        continue
        except (redis.RedisError, OSError) as error:
            raise _unavailable(error) from error
        raise Unavailable("other routers add to the same costs all the time")

    async def forget(self, tenant: str) -> None:
        """Delete a tenant's costs.

        Raises:
            Unavailable: Redis does not answer.
        """
        try:
            await self._redis.delete(self._key(tenant))
        except (redis.RedisError, OSError) as error:
            raise _unavailable(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    def _key(self, tenant: str | None) -> str:
        whose = "everybody" if tenant is None else f"of:{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"
        return f"outrider:learning:{{{self._scope}}}:{whose}"

    def _read(self, key: str, data: bytes) -> Sheet | None:
        """A sheet; None where it was not written here."""
        digest, body = data[:_DIGEST], data[_DIGEST:]
        try:
            if len(body) > _MOST_BYTES or digest != _digest(key, body):
                raise ValueError("it was altered, cut, or stood under another key")
            return _sheet(json.loads(body))
        except (ValueError, OverflowError, RecursionError) as error:
            if not self.damaged:
                log.warning("what routers have learnt is damaged in Redis, and is written anew: %s", error)
            self.damaged += 1
            return None


def _sheet(content: object) -> Sheet:
    """The sheet that JSON holds.

    Raises:
        ValueError: it holds none.
    """
    sheet: Sheet = {}
    for kind, costs in _mapping(content).items():
        if not _KIND.fullmatch(kind):
            raise ValueError("not a kind of prompts")
        # A later version may know further strategies.
        sheet[kind] = {name: _cost(numbers) for name, numbers in _mapping(costs).items() if name in STRATEGIES}
    return sheet


def _mapping(content: object) -> dict[str, object]:
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content


def _cost(numbers: object) -> ComparedCost:
    if not isinstance(numbers, list) or len(numbers) != NUMBERS:
        raise ValueError("not the sums of a cost")
    if not all(isinstance(each, int | float) and 0 <= each < math.inf for each in numbers):
        raise ValueError("not the sums of a cost")
    return ComparedCost(*map(float, numbers))


def _written(key: str, sheet: Sheet) -> bytes:
    content = {kind: {name: cost.numbers for name, cost in costs.items()} for kind, costs in sheet.items()}
    body = json.dumps(content, separators=(",", ":")).encode()
    return _digest(key, body) + body


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + body).digest()


def _unavailable(error: Exception) -> Unavailable:
    # Its words may hold addresses, which are no business of callers.
    log.debug("Redis, where routers share what they learn, does not answer: %s", error)
    return Unavailable("what routers have learnt cannot be reached; try again")
