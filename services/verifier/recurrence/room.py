"""For how many rows and states a pass has room in layers with a state: passes are made, and memory is planned, by it."""

from __future__ import annotations

from services.verifier.attention.calls import MAX_NODES
from services.verifier.attention.fixed import MOST_ROWS, Largest, rounded_up

# Room for accepted rows of a small captured pass, and for states that a captured one puts aside, which take memory.
_ACCEPTED, _PLACES = 32, 64


def room_for_accepted(rows: int) -> int:
    """For how many accepted rows a captured pass of so many rows has room."""
    return max(_ACCEPTED, rows)


def captured_places(rows: int) -> int:
    """How many states a captured pass of so many rows can put aside: a tree of n nodes does so with fewer than n / 2."""
    return min(_PLACES, 1 + rows // 2)


def places_of(nodes: int) -> int:
    """How many states are put aside at most for a tree of so many nodes (``walks``): log2(nodes + 1), rounded down."""
    return (1 + nodes).bit_length() - 1


def noted_rows(largest: Largest) -> int:
    """How many rows captured passes up to ``largest`` note, padding included, whichever way rows are rounded up."""
    return min(MOST_ROWS, rounded_up(largest.rows))


def launched_places(rows: int, requests: int) -> int:
    """How many states a pass of so many rows, of up to so many requests, can put aside.

    The first place of a request takes a row and a node behind it, and each further one as many nodes as it has rows
    (``places_of``). 8 rows are 4 requests of a node each, 2 of three nodes, or one of seven, which needs 3 places:

    >>> [launched_places(8, requests) for requests in (1, 2, 4)]
    [3, 4, 4]
    >>> launched_places(2048, 64)
    320
    """
    found, cost, left = 0, 2, rows
    for place in range(places_of(MAX_NODES)):
        some = min(requests, left // cost)
        found, left = found + some, left - some * cost
        cost = 2 << place
    return found
