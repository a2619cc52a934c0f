"""Errors as Anthropic's clients expect them: ``{"type": "error", "error": {"type", "message", ...}, "request_id"}``."""

from __future__ import annotations

from typing import Any

from services.api.http.door import Door
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


def message_error(error: OutriderError, request_id: str) -> dict[str, Any]:
    """The answer's JSON."""
    status = http_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    told = error_body(error)["error"]
    details = {"error_code": told["code"], "param": told["param"]}
    # The words by which clients know that they must shorten the conversation.
    long = "prompt is too long: " if told["code"] == _TOO_LONG else ""
    said = {"type": kind, "message": long + told["message"], "details": details}
    return {"type": "error", "error": said, "request_id": request_id}


ANTHROPIC = Door(message_error, (REQUEST_ID, "request-id"))
