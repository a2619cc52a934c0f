"""Receives what a link brings from one origin. A bad reply is logged and dropped, and does no harm to the link."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.verifier.engine.origins import Origin
from speculation.columns import DraftColumns
from speculation.messages import DraftingReply

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OriginReceiver:
    """Implements ``DraftReceiver`` for one origin.

    Attributes:
        replied: called with each reply; what it raises is logged.
        drafted: the same with several drafts.
        joined: called when the origin has connected.
    """

    origin: Origin
    replied: Callable[[Origin, DraftingReply], None]
    drafted: Callable[[Origin, DraftColumns], None]
    joined: Callable[[Origin], None]

    def on_reply(self, reply: DraftingReply) -> None:
        # A bad reply may cost speed, and nothing else.
        try:
            self.replied(self.origin, reply)
        except Exception:
            log.exception("handling a reply of %s failed; it is dropped", self.origin.name)

    def on_drafts(self, drafts: DraftColumns) -> None:
        try:
            self.drafted(self.origin, drafts)
        except Exception:
            log.exception("handling drafts of %s failed; they are dropped", self.origin.name)

    def on_connected(self) -> None:
        self.joined(self.origin)
