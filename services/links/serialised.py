"""The verifier's messages as serialised outrider.internal.v1 messages, for Ray Serve's handles and within one process."""

from __future__ import annotations

from outrider.internal.v1 import verification_pb2
from services.links.codec import verification as codec
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard


def write_request(request: GenerationRequest) -> bytes:
    """Router to verifier."""
    return codec.encode_generation(request).SerializeToString()


def read_request(data: bytes) -> GenerationRequest:
    """Decode the bytes of ``write_request``.

    Raises:
        InvalidArgument: a limit is broken; names the field.
    """
    return codec.decode_generation(verification_pb2.VerifyRequest.FromString(data))


def write_event(event: Progress | Finished) -> bytes:
    """Verifier to router."""
    return codec.encode_generation_event(event).SerializeToString()


def read_event(data: bytes) -> Progress | Finished:
    """Decode the bytes of ``write_event``."""
    return codec.decode_generation_event(verification_pb2.VerifyResponse.FromString(data))


def write_forget(tenant: str) -> bytes:
    """Router to verifier."""
    return codec.encode_forget(tenant).SerializeToString()


def read_forget(data: bytes) -> str:
    """Decode the bytes of ``write_forget``."""
    return codec.decode_forget(verification_pb2.ForgetRequest.FromString(data))


def write_card(card: VerifierCard) -> bytes:
    """Verifier to router."""
    return codec.encode_card(card).SerializeToString()


def read_card(data: bytes) -> VerifierCard:
    """Decode the bytes of ``write_card``."""
    return codec.decode_card(verification_pb2.DescribeResponse.FromString(data))
