"""The connections of a server: how many may be open at once, and how they are shared out between addresses.

A proxy may have them all, while there is room. When there is none, a connection of another address takes the place of one
that waits for a request and comes from the address with the most.
"""

from __future__ import annotations

from collections.abc import Callable

from services.api.call_slots import sharer


class ConnectionPlace:
    """One connection's place.

    Attributes:
        give_way: ends the connection; None while a request is under way on it, which nobody may interrupt.
        release: called when the connection is closed; may be called again.
    """

    def __init__(self, release: Callable[[ConnectionPlace], None]) -> None:
        self.give_way: Callable[[], object] | None = None
        self.release: Callable[[], None] = lambda: release(self)


class ConnectionPlaces:
    """So many connections at once.

    Args:
        most: connections, idle ones included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        # By who shares; each in the order in which they came.
        self._of: dict[str, dict[ConnectionPlace, None]] = {}

    def take(self, address: str) -> ConnectionPlace | None:
        """A place for a connection from ``address``; None: there is none."""
        who = sharer(address)
        if self._taken >= self._most and not self._make_room(len(self._of.get(who, ()))):
            return None
        place = ConnectionPlace(lambda place: self._release(who, place))
        self._of.setdefault(who, {})[place] = None
        self._taken += 1
        return place

    def _make_room(self, own: int) -> bool:
        """End a connection of the address with the most, if it has more than one that has ``own`` and one more would."""
        largest = max(self._of.values(), key=len)
        waiting = next((place for place in largest if place.give_way is not None), None)
        if waiting is None or waiting.give_way is None or len(largest) <= own + 1:
            return False
        waiting.release()
        waiting.give_way()
        return True

    def _release(self, who: str, place: ConnectionPlace) -> None:
        of_one = self._of.get(who, {})
        if place in of_one:
            self._taken -= 1
            del of_one[place]
            if not of_one:
                del self._of[who]
