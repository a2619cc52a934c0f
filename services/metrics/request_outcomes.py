"""How a request ended, in the words of ``requests_total``."""

from __future__ import annotations

import asyncio

from services.statuses import status_of
from speculation.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)

_REFUSED = (InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated)
_LEFT = (GeneratorExit, asyncio.CancelledError, Cancelled)


def outcome_of(error: BaseException) -> tuple[str, str]:
    """The labels of a request that ended in ``error``: outcome and gRPC status."""
    if isinstance(error, _LEFT):
        return "cancelled", "CANCELLED"
    if isinstance(error, DeadlineExceeded):
        return "cancelled", "DEADLINE_EXCEEDED"
    return "refused" if isinstance(error, _REFUSED) else "error", status_of(error).grpc
