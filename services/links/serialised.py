"""The verifier's messages as bytes, for carriers that know no protobuf (Ray Serve's handles); outrider.internal.v1's."""

from __future__ import annotations

from outrider.internal.v1 import verification_pb2
from services.links.codec import verification as codec
from speculation.messages import Finished, GenerationRequest, Progress, VerifierCard


def write_request(request: GenerationRequest) -> bytes:
    """Router to verifier."""
    return codec.encode_generation(request).SerializeToString()


def read_request(data: bytes) -> GenerationRequest:
    """What ``write_request`` has made.

    Raises:
        InvalidArgument: a limit is broken; names the field.
    """
    return codec.decode_generation(verification_pb2.VerifyRequest.FromString(data))


def write_event(event: Progress | Finished) -> bytes:
    """Verifier to router."""
    return codec.encode_generation_event(event).SerializeToString()


def read_event(data: bytes) -> Progress | Finished:
    """What ``write_event`` has made."""
    return codec.decode_generation_event(verification_pb2.VerifyResponse.FromString(data))


def write_card(card: VerifierCard) -> bytes:
    """Verifier to router."""
    return codec.encode_card(card).SerializeToString()


def read_card(data: bytes) -> VerifierCard:
    """What ``write_card`` has made."""
    return codec.decode_card(verification_pb2.DescribeResponse.FromString(data))
