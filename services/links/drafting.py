"""What both draft links share: answering one call."""

from __future__ import annotations

import logging

from speculation.messages import CloseSession, DraftFailure, DraftingCall, DraftingReply, OpenSession
from speculation.ports import Drafter

log = logging.getLogger(__name__)


async def answer(drafter: Drafter, call: DraftingCall) -> DraftingReply | None:
    """Hand ``call`` to ``drafter``. A drafter that raises has no draft: that is no reason to end the stream."""
    if isinstance(call, CloseSession):
        drafter.close(call)
        return None
    try:
        return await (drafter.open(call) if isinstance(call, OpenSession) else drafter.step(call))
    except Exception:
        log.exception("drafting failed for %s", call.session_id)
        return DraftFailure(session_id=call.session_id, reason="the drafter failed; its log says why")
