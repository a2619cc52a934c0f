"""Hands replies of a drafter over to the verifier's side of a draft link."""

from __future__ import annotations

from outrider.internal.v1 import drafting_pb2
from services.links.codec.drafting import decode_drafting_replies, decode_replies_together
from speculation.columns import DraftColumns
from speculation.ports import DraftReceiver, TakesDraftsTogether


class HandingOver:
    """To one receiver: drafts that share a message together, where it takes them so."""

    def __init__(self, receiver: DraftReceiver) -> None:
        self._receiver = receiver
        self._together = receiver if isinstance(receiver, TakesDraftsTogether) else None

    def message(self, wire: drafting_pb2.DraftResponse) -> None:
        """Hand over the replies of a message.

        Raises:
            InvalidArgument: it breaks a limit as a whole.
        """
        replies = decode_drafting_replies(wire) if self._together is None else decode_replies_together(wire)
        if isinstance(replies, DraftColumns):
            assert self._together is not None
            self._together.on_drafts(replies)
            return
        for reply in replies:
            self._receiver.on_reply(reply)
