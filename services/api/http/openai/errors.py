"""Our errors as OpenAI's clients expect them: a status, headers, and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from typing import Any

from services.logs.printable import printable
from services.statuses import status_of
from speculation.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    OutriderError,
    PermissionDenied,
    PromptTooLong,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

Headers = list[tuple[str, str]]


class Refused(InvalidArgument):
    """A field that OpenAI's API does not have, or not so.

    Attributes:
        code: what is wrong with it, in OpenAI's words.
    """

    def __init__(self, field: str, value: object, allowed: str, code: str = "invalid_value") -> None:
        super().__init__(field, value, allowed)
        self.code = code


def shown(value: object) -> object:
    """A value in an error about a field: of lists and objects not all that is in them."""
    return value if isinstance(value, str | int | float) and value != "" else "set"


def renamed(error: InvalidArgument, field: str, *, value: str | None = None, allowed: str | None = None) -> InvalidArgument:
    """The same error about a field that is called otherwise, and so perhaps its value and what is allowed."""
    told = error.value if value is None else value, error.allowed if allowed is None else allowed
    return Refused(field, *told, error.code) if isinstance(error, Refused) else type(error)(field, *told)


class HttpError(OutriderError):
    """A call that fails for HTTP's own reasons, such as a body that is too large."""

    def __init__(self, status: int, code: str, message: str, headers: Headers | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or []


# The ``code`` of errors other than ``Refused`` and ``HttpError``; the most specific class counts.
_CODES: dict[type[OutriderError], str] = {
    PromptTooLong: "context_length_exceeded",
    NotFound: "model_not_found",
    InvalidArgument: "invalid_value",
    Unauthenticated: "invalid_api_key",
    PermissionDenied: "insufficient_permissions",
    ResourceExhausted: "rate_limit_exceeded",
    Unavailable: "service_unavailable",
}
# Characters of a message: parts of it may come from a request or a chat template.
_MOST_SHOWN = 1000
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def http_status(error: OutriderError) -> int:
    """The status of an answer that is ``error``."""
    return error.status if isinstance(error, HttpError) else status_of(error).http


def error_body(error: OutriderError) -> dict[str, Any]:
    """The answer's JSON."""
    status = http_status(error)
    own = error.code if isinstance(error, Refused | HttpError) else None
    code = own or next((_CODES[cls] for cls in type(error).__mro__ if cls in _CODES), None)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param = error.field if isinstance(error, InvalidArgument) else None
    return {"error": {"message": printable(str(error), _MOST_SHOWN), "type": kind, "param": param, "code": code}}


def error_headers(error: OutriderError) -> Headers:
    """Headers that tell clients whether and when to try again; OpenAI's own client obeys them."""
    if isinstance(error, HttpError):
        return error.headers
    if isinstance(error, ResourceExhausted):
        wait_s = error.retry_after_s
        return [("retry-after", str(max(1, math.ceil(wait_s)))), ("retry-after-ms", str(max(1, math.ceil(wait_s * 1000))))]
    if isinstance(error, Unavailable):
        return [("retry-after", "1")]
    if isinstance(error, Internal):
        # What fails here fails again.
        return [("x-should-retry", "false")]
    if isinstance(error, Unauthenticated):
        return [("www-authenticate", "Bearer")]
    return []
