"""The status of every error: gRPC's name for it, and the HTTP code."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from speculation.errors import (
    Cancelled,
    ConfigurationError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MalformedTree,
    NodeTaken,
    NotBegun,
    NotFound,
    OutriderError,
    PermissionDenied,
    PromptTooLong,
    ResourceExhausted,
    TargetLost,
    Unauthenticated,
    Unavailable,
)


class Status(NamedTuple):
    """An error's gRPC status name and HTTP code."""

    grpc: str
    http: int


# By error class; the most specific class in the table counts.
STATUS: dict[type[OutriderError], Status] = {
    InvalidArgument: Status("INVALID_ARGUMENT", 400),
    PromptTooLong: Status("OUT_OF_RANGE", 400),
    MalformedTree: Status("INVALID_ARGUMENT", 400),
    # Not 409 or 5xx, which OpenAI's clients try again: nothing will have changed.
    ConfigurationError: Status("FAILED_PRECONDITION", 400),
    Unauthenticated: Status("UNAUTHENTICATED", 401),
    PermissionDenied: Status("PERMISSION_DENIED", 403),
    NotFound: Status("NOT_FOUND", 404),
    ResourceExhausted: Status("RESOURCE_EXHAUSTED", 429),
    Unavailable: Status("UNAVAILABLE", 503),
    TargetLost: Status("UNAVAILABLE", 503),
    NotBegun: Status("UNAVAILABLE", 503),
    NodeTaken: Status("UNAVAILABLE", 503),
    DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
    Cancelled: Status("CANCELLED", 499),
    Internal: Status("INTERNAL", 500),
}


def status_of(error: BaseException) -> Status:
    """The status of ``error``. Errors of other kinds than ours count as ``Internal``."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return STATUS[Internal]


_REFUSED = (InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated)
_LEFT = (GeneratorExit, asyncio.CancelledError, Cancelled)


def outcome_of(error: BaseException) -> tuple[str, str]:
    """The labels of a request that ended in ``error``: outcome and gRPC status."""
    if isinstance(error, _LEFT):
        return "cancelled", "CANCELLED"
    if isinstance(error, DeadlineExceeded):
        return "cancelled", "DEADLINE_EXCEEDED"
    return "refused" if isinstance(error, _REFUSED) else "error", status_of(error).grpc
