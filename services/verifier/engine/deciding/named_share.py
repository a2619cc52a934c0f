"""Bounds how much requests that follow their paper's rule slow down the others of their passes. Uses no clock.

Among themselves, such requests wait for every draft and check all of it. In a pass with others, the time that this adds is
paid from an account. The account earns a share of the time of such passes. Where it cannot pay, the step goes on without the
draft, and the nodes are chosen as for any other request.
"""

from __future__ import annotations

# The account holds at most what so many seconds of shared passes earn, so that a long peace pays for no long stall.
_MOST_S = 10.0


class NamedShare:
    """The account of one loop.

    Args:
        share: what it earns of the time of shared passes.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._account_s = 0.0
        # Since the last pass.
        self._added_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that the coming pass may be made longer."""
        return max(0.0, self._account_s)

    def passed(self, seconds: float) -> None:
        """Credit a shared pass, but for the time that was added to it."""
        own_s, self._added_s = max(0.0, seconds - self._added_s), 0.0
        self._account_s = min(self._share * _MOST_S, self._account_s + self._share * own_s)

    def spend(self, seconds: float) -> None:
        """Debit time that has been added to a shared pass."""
        self._account_s -= seconds
        self._added_s += seconds
