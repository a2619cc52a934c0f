"""Hands replies of a drafter over to the verifier's side of a draft link."""

from __future__ import annotations

from outrider.internal.v1 import drafting_pb2
from services.links.codec.drafting import decode_replies_together
from speculation.columns import DraftColumns
from speculation.ports import DraftReceiver


def hand_over(wire: drafting_pb2.DraftResponse, receiver: DraftReceiver) -> None:
    """Hand over the replies of a message: several drafts together, where their columns have room for all of them.

    Raises:
        InvalidArgument: it breaks a limit as a whole.
    """
    replies = decode_replies_together(wire)
    if isinstance(replies, DraftColumns):
        receiver.on_drafts(replies)
        return
    for reply in replies:
        receiver.on_reply(reply)
