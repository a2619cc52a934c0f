"""Tracks the drafter's sessions that one conversation has opened, so that none outlives it."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from speculation.messages import CloseSession
from speculation.ports import Drafter

log = logging.getLogger(__name__)

# A running request sends a call with every step. A request that is silent for this long is reopened when it goes on.
SILENCE_S = 120.0


class OpenSessions:
    """The open sessions of one verifier, ordered by their last call.

    The call that closes a session may get lost when a stream breaks or a verifier dies. So a session also ends with its
    conversation, or after ``silence_s`` seconds without a call. A session closed too early is reopened after its next step.

    Args:
        silence_s: seconds without a call after which a session is closed.
        clock: the current time in seconds.
    """

    def __init__(self, drafter: Drafter, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._drafter = drafter
        self._silence_s = silence_s
        self._clock = clock
        self._heard: OrderedDict[str, float] = OrderedDict()

    def opened(self, session_id: str) -> None:
        """Note a new session."""
        self._heard[session_id] = self._clock()
        self._heard.move_to_end(session_id)

    def heard(self, *session_ids: str) -> None:
        """Note a call for each of these sessions. Sessions not opened here are ignored."""
        now, known = self._clock(), self._heard
        for session_id in session_ids:
            if session_id in known:
                known[session_id] = now
                known.move_to_end(session_id)

    def close(self, session_id: str) -> None:
        """Close a session at the drafter. Unknown ids are fine."""
        self._heard.pop(session_id, None)
        try:
            self._drafter.close(CloseSession(session_id=session_id))
        except Exception:
            log.exception("closing session %s failed", session_id)

    def close_silent(self) -> float:
        """Close the sessions that were silent for too long. Returns the seconds until the next one may be."""
        now = self._clock()
        while self._heard:
            session_id, at = next(iter(self._heard.items()))
            if (left := at + self._silence_s - now) > 0:
                return left
            self.close(session_id)
        return self._silence_s

    def close_all(self) -> None:
        """Close all sessions."""
        while self._heard:
            self.close(next(iter(self._heard)))
