"""Slots for calls over gRPC and HTTP: how many are answered at once. The last ones are kept for addresses that hold few."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from speculation.errors import ResourceExhausted

# Who has one address of version 6 has a network of so many bits.
_NETWORK_BITS = 64
# The part that is kept, of more than so few slots.
_KEPT_PART = 8


class CallSlots:
    """So many calls at once, and no more. An address may have all but an eighth; of that, none has more than the half.

    Args:
        most: calls.
        name: of the limit, for the error.
        of_one: most calls of one address.
    """

    def __init__(self, most: int, name: str, *, of_one: int | None = None) -> None:
        self._most = most
        self._name = name
        self._of_one = most if of_one is None else of_one
        self._kept = most // _KEPT_PART
        self._taken = 0
        self._of: Counter[str] = Counter()

    @contextmanager
    def taken(self, address: str) -> Iterator[None]:
        """A slot, while the block runs.

        Args:
            address: where the call comes from, with its port, as gRPC or HTTP have it.

        Raises:
            ResourceExhausted: there is none, or only those that are kept for others.
        """
        sharer = sharer_at(address)
        own = self._of[sharer]
        left = self._most - self._taken
        if left <= 0 or own >= self._of_one or (left <= self._kept and own > self._kept // 2):
            why = f"{self._taken} calls are under way already, {own} of this address ({self._name}); try again"
            raise ResourceExhausted(why)
        self._taken += 1
        self._of[sharer] += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._of[sharer] -= 1
            if not self._of[sharer]:
                del self._of[sharer]


def sharer_at(address: str) -> str:
    """Who shares with others, by an address with its port: such as ``1.2.3.4:80``, or gRPC's ``ipv6:%5B::1%5D:80``."""
    peer = unquote(address)
    return sharer(peer.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]"))


def sharer(host: str) -> str:
    """Who shares with others: an address, or a network where each caller has many."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if found.version == 4:
        return host
    own = found.ipv4_mapped
    return str(own or ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
