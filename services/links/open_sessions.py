"""Which of a drafter's sessions one conversation has opened, so that none outlives it."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from speculation.messages import CloseSession
from speculation.ports import Drafter

log = logging.getLogger(__name__)

# A live request says something with every step. One that waits this long is opened anew when it goes on.
SILENCE_S = 120.0


class OpenSessions:
    """The sessions of one verifier, the one that was silent for longest first.

    What ends a session may get lost: a stream breaks, a verifier dies. So a session lives until it is closed, until its
    conversation ends, or until nothing has been said of it for ``silence_s``, whatever comes first. One that was closed too
    early is opened anew by its next step.

    Args:
        silence_s: seconds.
    """

    def __init__(self, drafter: Drafter, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._drafter = drafter
        self._silence_s = silence_s
        self._clock = clock
        self._heard: OrderedDict[str, float] = OrderedDict()

    def opened(self, session_id: str) -> None:
        """Something begins that a drafter keeps."""
        self._heard[session_id] = self._clock()
        self._heard.move_to_end(session_id)

    def heard(self, session_id: str) -> None:
        """Note a sign of life; of sessions that were not opened here, nothing is noted."""
        if session_id in self._heard:
            self.opened(session_id)

    def close(self, session_id: str) -> None:
        """End a session; unknown ones are fine."""
        self._heard.pop(session_id, None)
        try:
            self._drafter.close(CloseSession(session_id=session_id))
        except Exception:
            log.exception("closing %s failed", session_id)

    def close_silent(self) -> float:
        """End those of which nothing was heard for too long; gives the seconds until there may be more of them."""
        now = self._clock()
        while self._heard:
            session_id, at = next(iter(self._heard.items()))
            if (left := at + self._silence_s - now) > 0:
                return left
            self.close(session_id)
        return self._silence_s

    def close_all(self) -> None:
        """End all."""
        while self._heard:
            self.close(next(iter(self._heard)))
