"""The keys of tenants, which may be replaced while requests run; one tenant's have limits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from services.access.key_records import KeyRecord, hash_key
from tests.simulation.schedule import LIMITED, Setup


class TenantKeys:
    """One present key for each tenant.

    Attributes:
        replaced: how many keys a tenant had before it.
        at_once: how many answers at once the limited tenant may have, with the second since which it may; None: any number.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.replaced: Counter[str] = Counter()
        self.at_once: list[tuple[float, int | None]] = [(0.0, setup.max_concurrent)]

    def of(self, tenant: str) -> str:
        """The present key."""
        return f"key {self.replaced[tenant]} of {tenant}"

    def record(self, tenant: str) -> KeyRecord:
        """The present key's record."""
        record, setup = KeyRecord(hash=hash_key(self.of(tenant)), id=tenant, tenant=tenant), self._setup
        if tenant != LIMITED:
            return record
        return replace(
            record,
            max_concurrent=self.at_once[-1][1],
            requests_per_minute=setup.requests_per_minute,
            tokens_per_minute=setup.tokens_per_minute,
        )

    def replace(self, tenant: str, now_s: float) -> None:
        """Another key takes the present one's place; the limited tenant's has another limit, too."""
        self.replaced[tenant] += 1
        if tenant == LIMITED:
            self.at_once.append((now_s, 2 if self.at_once[-1][1] == 1 else 1))
