"""Reads google.rpc.RetryInfo from a failed call, without the package of Google's common protos."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError

_KEY = "grpc-status-details-bin"
_TYPE = "google.rpc.RetryInfo"
# Fields on the wire: google.rpc.Status.details and google.rpc.RetryInfo.retry_delay.
_DETAILS, _DELAY = 3, 1
_LENGTH_DELIMITED, _VARINT = 2, 0


def retry_delay_s(call: grpc.Call) -> float | None:
    """Seconds after which the server wants a retry; None: it did not say."""
    for key, value in call.trailing_metadata() or ():
        if key == _KEY and isinstance(value, bytes):
            try:
                return _delay_in(value)
            except (DecodeError, IndexError):
                return None
    return None


def _delay_in(status: bytes) -> float | None:
    for detail in _messages(status, _DETAILS):
        packed = any_pb2.Any.FromString(detail)
        if packed.type_url.rpartition("/")[2] == _TYPE:
            for delay in _messages(packed.value, _DELAY):
                told = duration_pb2.Duration.FromString(delay)
                return max(0.0, told.seconds + told.nanos / 1e9)
    return None


def _messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The messages in one field of a serialised message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == _VARINT:
            _, at = _varint(data, at)
        elif tag & 7 == _LENGTH_DELIMITED:
            size, at = _varint(data, at)
            if tag >> 3 == wanted:
                yield data[at : at + size]
            at += size
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return number, at
