"""The verifier's messages as serialised outrider.internal.v1 messages, for Ray Serve's handles and within one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outrider.internal.v1 import verification_pb2 as pb
from services.links.codec import verification as codec
from speculation.adapters import AdapterOrder
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.reloads import ReloadOrder
from speculation.types import Plan

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class Serialised(Generic[_Message]):
    """One kind of message as bytes. ``read`` raises what ``decode`` raises."""

    encode: Callable[[_Message], Any]
    decode: Callable[[Any], _Message]
    wire: type[Any]

    def write(self, message: _Message) -> bytes:
        """The bytes of a message."""
        found: bytes = self.encode(message).SerializeToString()
        return found

    def read(self, data: bytes) -> _Message:
        """The message of ``write``."""
        return self.decode(self.wire.FromString(data))


# Router to verifier.
REQUEST: Serialised[GenerationRequest] = Serialised(codec.encode_generation, codec.decode_generation, pb.VerifyRequest)
COMPARING: Serialised[tuple[GenerationRequest, Sequence[Plan]]] = Serialised(
    lambda asked: codec.encode_comparing(*asked), codec.decode_comparing, pb.CompareRequest
)
FORGET: Serialised[str] = Serialised(codec.encode_forget, codec.decode_forget, pb.ForgetRequest)
ADAPTING: Serialised[AdapterOrder] = Serialised(codec.encode_adapting, codec.decode_adapting, pb.AdaptRequest)
RELOAD: Serialised[ReloadOrder] = Serialised(codec.encode_reload, codec.decode_reload, pb.ReloadRequest)
# Verifier to router.
COMPARISONS: Serialised[tuple[ReplayedAnswer, ...]] = Serialised(
    codec.encode_comparisons, codec.decode_comparisons, pb.CompareResponse
)
CARD: Serialised[VerifierCard] = Serialised(codec.encode_card, codec.decode_card, pb.DescribeResponse)


async def write_event(event: Progress | Finished) -> bytes:
    """Verifier to router."""
    return (await codec.encode_event_in_turns(event)).SerializeToString()


async def read_event(data: bytes) -> Progress | Finished:
    """The event of ``write_event``."""
    return await codec.decode_event_in_turns(pb.VerifyResponse.FromString(data))
