"""The verifier's messages as serialised outrider.internal.v1 messages, for Ray Serve's handles and within one process."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.internal.v1 import verification_pb2
from services.links.codec import verification as codec
from speculation.adapters import AdapterOrder
from speculation.messages import Finished, GenerationRequest, Progress, ReplayedAnswer, VerifierCard
from speculation.reloads import ReloadOrder
from speculation.types import Plan


def write_request(request: GenerationRequest) -> bytes:
    """Router to verifier."""
    return codec.encode_generation(request).SerializeToString()


def read_request(data: bytes) -> GenerationRequest:
    """Decode the bytes of ``write_request``.

    Raises:
        InvalidArgument: a limit is broken; names the field.
    """
    return codec.decode_generation(verification_pb2.VerifyRequest.FromString(data))


async def write_event(event: Progress | Finished) -> bytes:
    """Verifier to router."""
    return (await codec.encode_event_in_turns(event)).SerializeToString()


async def read_event(data: bytes) -> Progress | Finished:
    """Decode the bytes of ``write_event``."""
    return await codec.decode_event_in_turns(verification_pb2.VerifyResponse.FromString(data))


def write_comparing(request: GenerationRequest, plans: Sequence[Plan]) -> bytes:
    """Router to verifier."""
    return codec.encode_comparing(request, plans).SerializeToString()


def read_comparing(data: bytes) -> tuple[GenerationRequest, tuple[Plan, ...]]:
    """Decode the bytes of ``write_comparing``.

    Raises:
        InvalidArgument: a limit is broken; names the field.
    """
    return codec.decode_comparing(verification_pb2.CompareRequest.FromString(data))


def write_comparisons(found: Sequence[ReplayedAnswer]) -> bytes:
    """Verifier to router."""
    return codec.encode_comparisons(found).SerializeToString()


def read_comparisons(data: bytes) -> tuple[ReplayedAnswer, ...]:
    """Decode the bytes of ``write_comparisons``."""
    return codec.decode_comparisons(verification_pb2.CompareResponse.FromString(data))


def write_forget(tenant: str) -> bytes:
    """Router to verifier."""
    return codec.encode_forget(tenant).SerializeToString()


def read_forget(data: bytes) -> str:
    """Decode the bytes of ``write_forget``."""
    return codec.decode_forget(verification_pb2.ForgetRequest.FromString(data))


def write_adapting(order: AdapterOrder) -> bytes:
    """Router to verifier."""
    return codec.encode_adapting(order).SerializeToString()


def read_adapting(data: bytes) -> AdapterOrder:
    """Decode the bytes of ``write_adapting``.

    Raises:
        InvalidArgument: an unknown step.
    """
    return codec.decode_adapting(verification_pb2.AdaptRequest.FromString(data))


def write_reload(order: ReloadOrder) -> bytes:
    """Router to verifier."""
    return codec.encode_reload(order).SerializeToString()


def read_reload(data: bytes) -> ReloadOrder:
    """Decode the bytes of ``write_reload``.

    Raises:
        InvalidArgument: a value is unknown; names the field.
    """
    return codec.decode_reload(verification_pb2.ReloadRequest.FromString(data))


def write_card(card: VerifierCard) -> bytes:
    """Verifier to router."""
    return codec.encode_card(card).SerializeToString()


def read_card(data: bytes) -> VerifierCard:
    """Decode the bytes of ``write_card``."""
    return codec.decode_card(verification_pb2.DescribeResponse.FromString(data))
