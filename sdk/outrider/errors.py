"""What a call may raise.

::

    OutriderError
    ├── InvalidArgument      a parameter is wrong; .field, .value, .allowed say which and why
    │   ├── NotFound         no such model
    │   └── FailedPrecondition  it would be right elsewhere: this service's settings or models do not allow it
    ├── Unauthenticated      no API key, or an unknown one
    ├── PermissionDenied     the API key may not do this
    ├── ResourceExhausted    the server is full; .retry_after_s says when to try again
    ├── Unavailable          the server cannot be reached, or is starting or stopping
    ├── DeadlineExceeded     the timeout has passed
    ├── Cancelled            the client was closed while the call ran
    └── InternalError        the server failed
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from outrider._addresses import host_of, names_port, proxy_before
from outrider._retry_info import retry_delay_s
from outrider.v1 import generation_pb2 as pb

_CONNECTING = "Failed to connect to remote host: "
_BACKENDS = re.compile(r"^.*; last error: [A-Z]+: ipv[46]:\S+: ")
# What gRPC says where one side speaks TLS and the other does not, or shows a certificate that is not good here.
_TLS = {
    "WRONG_VERSION_NUMBER": "{address} speaks no TLS: ask it without (no tls=True, no --tls)",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of {address} is not trusted here: name the authority that signed it "
    "(root_certificates, --tls-root)",
    "Hostname Verification Check failed": "the certificate of {address} is for another name: ask by that one",
}
_DETAIL_KEY = "outrider-error-bin"
REQUEST_ID = "x-request-id"


class OutriderError(Exception):
    """Root of all errors that the client raises.

    Attributes:
        request_id: what the request is called in the server's logs; where no server has said so, what its caller has called
            it, or empty.
    """

    request_id: str = ""


class InvalidArgument(OutriderError):
    """A parameter is wrong.

    Attributes:
        field: its name; empty if the server did not say.
        value: what was given, shortened.
        allowed: what would be right.
    """

    def __init__(self, message: str, field: str = "", value: str = "", allowed: str = "") -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(message)


class NotFound(InvalidArgument):
    """No such model."""


class FailedPrecondition(InvalidArgument):
    """It would be right elsewhere: this service's settings or models do not allow it, such as weights of another shape."""


class Unauthenticated(OutriderError):
    """No API key, or an unknown one."""


class PermissionDenied(OutriderError):
    """The API key may not do this."""


class ResourceExhausted(OutriderError):
    """The server is full.

    Attributes:
        retry_after_s: seconds after which a retry makes sense.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Unavailable(OutriderError):
    """The server cannot be reached, or is starting or stopping.

    Attributes:
        retry_after_s: seconds after which a retry makes sense, if the server said so.
    """

    retry_after_s: float | None = None


class DeadlineExceeded(OutriderError):
    """The timeout has passed."""


class Cancelled(OutriderError):
    """The client was closed while the call ran."""


class InternalError(OutriderError):
    """The server failed."""


_WITH_FIELD: dict[grpc.StatusCode, type[InvalidArgument]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
}
_PLAIN: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_rpc(
    error: grpc.RpcError, address: str, sent: Iterable[tuple[str, str]] = (), *, closed: bool = False
) -> OutriderError:
    """The typed error for a failed call.

    Args:
        sent: the call's own metadata, which names the request where no server has.
        closed: whether the caller has closed the client, which cancels its calls.
    """
    # What grpc raises is also a Call, though its types do not say so.
    call = cast(grpc.Call, error)
    raised = _typed(call, address, closed=closed)
    metadata = (*(call.initial_metadata() or ()), *(call.trailing_metadata() or ()), *sent)
    raised.request_id = next((str(value) for key, value in metadata if key == REQUEST_ID), "")
    return raised


def _typed(call: grpc.Call, address: str, *, closed: bool) -> OutriderError:
    code, message = call.code(), call.details() or ""
    detail = _detail(call)
    if code in _WITH_FIELD:
        return _WITH_FIELD[code](message, detail.field, detail.value, detail.allowed)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ResourceExhausted(message, detail.retry_after_s or retry_delay_s(call) or 1.0)
    if code is grpc.StatusCode.CANCELLED and not (closed or _answered(call)):
        # Nobody here wanted that: gRPC says so of calls that reach a server in the moment in which it stops.
        code, message = grpc.StatusCode.UNAVAILABLE, "the server that stops there has dropped the call"
    if code is grpc.StatusCode.UNAVAILABLE and "http1.x server" in message:
        message = f"{address} is no gRPC server, but speaks HTTP; gRPC has a port of its own, 50051 unless told otherwise"
    elif code is grpc.StatusCode.UNAVAILABLE and (
        about := next((said for words, said in _TLS.items() if words in message), "")
    ):
        message = about.format(address=address)
    elif code is grpc.StatusCode.UNAVAILABLE and not _answered(call):
        # gRPC's own words name the address again, and what it calls its backends.
        why = _BACKENDS.sub("", message.rpartition(_CONNECTING)[2])
        message = f"no Outrider server answers at {address}, or not any more ({why}); start one with `outrider serve`"
        if "Socket closed" in why:
            message += ". If it speaks TLS, ask it so (tls=True, --tls)"
        if not names_port(address):
            message += f". Without a port gRPC takes 443: {address}:50051 names Outrider's"
        if (proxy := proxy_before(address)) is not None:
            message += f". The call went through the proxy that {proxy} names; no_proxy={host_of(address)} avoids it"
    raised = _PLAIN.get(code, InternalError)(message)
    if isinstance(raised, Unavailable):
        raised.retry_after_s = retry_delay_s(call)
    return raised


def _answered(call: grpc.Call) -> bool:
    """Whether the error comes from a server of ours rather than from the network."""
    return any(key == _DETAIL_KEY for key, _ in call.trailing_metadata() or ())


def _detail(call: grpc.Call) -> pb.ErrorDetail:
    for key, value in call.trailing_metadata() or ():
        if key == _DETAIL_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return pb.ErrorDetail()
    return pb.ErrorDetail()
