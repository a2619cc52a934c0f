"""No address has all slots: the last ones are for those that have few."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from services.api.call_slots import CallSlots, sharer_at
from services.api.config import PublicServerConfig
from speculation.errors import ResourceExhausted


def fill(slots: CallSlots, address: str, held: ExitStack) -> int:
    """Take all that this address gets, each call on a connection of its own; how many."""
    taken = 0
    while True:
        try:
            held.enter_context(slots.taken(f"{address}:{1000 + taken}"))
        except ResourceExhausted:
            return taken
        taken += 1


def test_one_address_leaves_slots_to_others() -> None:
    slots = CallSlots(64, "max_concurrent_requests")
    with ExitStack() as crowd, ExitStack() as others:
        assert fill(slots, "ipv4:1.1.1.1", crowd) == 56
        assert fill(slots, "ipv4:2.2.2.2", others) == 5
        assert fill(slots, "ipv4:3.3.3.3", others) == 3
        assert fill(slots, "ipv4:4.4.4.4", others) == 0
        # What one gives back to the common part it may take again.
        crowd.close()
        assert fill(slots, "ipv4:1.1.1.1", crowd) == 48
    with ExitStack() as all_of_them:
        assert fill(slots, "ipv4:2.2.2.2", all_of_them) == 56
    assert not slots._of


def test_by_default_a_thousand_calls_of_one_address_are_taken() -> None:
    with ExitStack() as benchmark:
        assert fill(CallSlots(PublicServerConfig().max_concurrent_requests, "all"), "ipv4:1.1.1.1", benchmark) >= 1000


def test_of_a_few_slots_none_is_kept() -> None:
    with ExitStack() as held:
        assert fill(CallSlots(7, "health checks"), "ipv4:1.1.1.1", held) == 7


def test_one_address_has_no_more_than_its_own_limit() -> None:
    slots = CallSlots(256, "health checks", of_one=16)
    with ExitStack() as one, ExitStack() as other:
        assert fill(slots, "ipv4:1.1.1.1", one) == fill(slots, "ipv4:2.2.2.2", other) == 16


@pytest.mark.parametrize(
    ("address", "sharer"),
    [
        ("127.0.0.1:80", "127.0.0.1"),
        ("ipv4:127.0.0.1:80", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:80", "2001:db8::/64"),
        ("ipv6:[2001:db8::2]:81", "2001:db8::/64"),
        ("ipv6:%5B::ffff:1.1.1.1%5D:80", "1.1.1.1"),
        ("2001:db8::1:80", "2001:db8::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64"),
    ],
)
def test_who_shares(address: str, sharer: str) -> None:
    assert sharer_at(address) == sharer
