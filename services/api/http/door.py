"""What differs between the APIs in every answer: how an error is written, and what the request's id is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.api.http.openai.errors import error_body, http_status
from services.links.request_names import REQUEST_ID
from speculation.errors import OutriderError

_TOO_LONG = "context_length_exceeded"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Door:
    """One API.

    Attributes:
        error: the JSON of an answer that is an error, given the request's id.
        id_headers: the headers that hold the id.
    """

    error: Callable[[OutriderError, str], dict[str, Any]]
    id_headers: tuple[str, ...]


OPENAI = Door(lambda error, _: error_body(error), (REQUEST_ID,))


def message_error(error: OutriderError, request_id: str) -> dict[str, Any]:
    """As Anthropic's clients expect it: ``{"type": "error", "error": {"type", "message", ...}, "request_id"}``."""
    status = http_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = error_body(error)["error"]
    details = {"error_code": told["code"], "param": told["param"]}
    # The words by which clients know that they must shorten the conversation.
    long = "prompt is too long: " if told["code"] == _TOO_LONG else ""
    said = {"type": kind, "message": long + told["message"], "details": details}
    return {"type": "error", "error": said, "request_id": request_id}


ANTHROPIC = Door(message_error, (REQUEST_ID, "request-id"))

OLLAMA = Door(lambda error, _: {"error": error_body(error)["error"]["message"]}, (REQUEST_ID,))
