"""No address has all seats: the last ones are for those that have few."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from services.api.config import PublicServerConfig
from services.api.seats import Seats, sharer_at
from speculation.errors import ResourceExhausted


def fill(seats: Seats, address: str, held: ExitStack) -> int:
    """Take all that this address gets, each call on a connection of its own; how many."""
    taken = 0
    while True:
        try:
            held.enter_context(seats.taken(f"{address}:{1000 + taken}"))
        except ResourceExhausted:
            return taken
        taken += 1


def test_one_address_leaves_seats_to_others() -> None:
    seats = Seats(64, "max_concurrent_requests")
    with ExitStack() as crowd, ExitStack() as others:
        assert fill(seats, "ipv4:1.1.1.1", crowd) == 56
        assert fill(seats, "ipv4:2.2.2.2", others) == 5
        assert fill(seats, "ipv4:3.3.3.3", others) == 3
        assert fill(seats, "ipv4:4.4.4.4", others) == 0
        # What one gives back to the common part it may take again.
        crowd.close()
        assert fill(seats, "ipv4:1.1.1.1", crowd) == 48
    with ExitStack() as all_of_them:
        assert fill(seats, "ipv4:2.2.2.2", all_of_them) == 56
    assert not seats._of


def test_by_default_a_thousand_calls_of_one_address_are_taken() -> None:
    with ExitStack() as benchmark:
        assert fill(Seats(PublicServerConfig().max_concurrent_requests, "all"), "ipv4:1.1.1.1", benchmark) >= 1000


def test_of_a_few_seats_none_is_kept() -> None:
    with ExitStack() as held:
        assert fill(Seats(7, "health checks"), "ipv4:1.1.1.1", held) == 7


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
