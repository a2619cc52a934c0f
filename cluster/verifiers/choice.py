"""In which order to try the verifiers for a request: a decision of numbers alone, which needs no Ray.

``cluster.ray.sticky_router`` makes it inside Ray Serve, ``benchmarks.fleet`` in its simulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

# A request leaves the verifier that its beginning belongs to once that one has so many times the average load.
_MOST_LOADED = 1.25
# Tokens of a prompt that count: two blocks of the key-value cache. More would part the turns of short conversations.
_BEGINNING = 128

_Replica = TypeVar("_Replica")


def attempt_of(request_id: str) -> int:
    """How often the router has moved a request, the last part of its id."""
    moved = request_id.rpartition(".")[2]
    return int(moved) if moved.isdecimal() else 0


def session_of(tenant: str | None, prompt: Sequence[int], attempt: int = 0) -> str:
    """Name of what should stay together: one tenant's prompts that begin alike.

    Args:
        attempt: how many verifiers the request has been sent to before; each time the next one comes first.
    """
    text = f"{tenant or ''}|{','.join(map(str, prompt[:_BEGINNING]))}"
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}:{attempt}"


def place_of(session: str) -> str:
    """The part of a session's name that gives its place on the ring: all its attempts have the same."""
    return session.rpartition(":")[0] or session


def choices(ring: Sequence[_Replica], session: str, load: Callable[[_Replica], int]) -> list[_Replica]:
    """Verifiers in the order in which to try them.

    A request that has failed somewhere goes around by turns, whatever the loads: a verifier that hangs refuses what it is
    asked, so it looks idle, and would get every further attempt as well.

    Args:
        ring: all of them, the one that the session belongs to first.
        session: of ``session_of``.
        load: requests at a verifier.
    """
    turned = next_first(ring, session)
    if session.rpartition(":")[2] != "0":
        return turned
    return [turned[index] for index in within_bounds([load(replica) for replica in turned])]


def within_bounds(loads: Sequence[int]) -> list[int]:
    """Indices of replicas in the order in which to try them.

    Consistent hashing with bounded loads (https://arxiv.org/abs/1608.01350): the preferred order, but for those that have
    more than their share, which come last, the least loaded first.

    Args:
        loads: requests at each replica, the preferred one first.
    """
    # Where there is next to no load, a share is less than the request itself.
    share = max(1.0, _MOST_LOADED * (sum(loads) + 1) / len(loads))
    room = [index for index, load in enumerate(loads) if load + 1 <= share]
    if len(room) == len(loads):
        return room
    return room + sorted((index for index, load in enumerate(loads) if load + 1 > share), key=loads.__getitem__)


def next_first(order: Sequence[_Replica], session: str) -> list[_Replica]:
    """``order``, turned so that what ``session``'s earlier attempts have tried first comes last."""
    turn = int(session.rpartition(":")[2]) % len(order)
    return [*order[turn:], *order[:turn]]
