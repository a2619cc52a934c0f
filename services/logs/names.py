"""The names of requests and sessions in logs."""

from __future__ import annotations


def log_name(name: str, traceparent: str) -> str:
    """The name of a request or session in logs, with its trace, so that a search for either finds the line."""
    return f"{name} (trace {traceparent})" if traceparent else name


class UsersName(str):
    """The user's name of a request, for log lines that are written before the request has a name of ours.

    Attributes:
        request_id: the user's id.
        traceparent: the user's trace; empty: none.
    """

    request_id: str
    traceparent: str

    def __new__(cls, request_id: str, traceparent: str = "") -> UsersName:
        """The text is that of ``log_name``."""
        made = super().__new__(cls, log_name(request_id, traceparent))
        made.request_id, made.traceparent = request_id, traceparent
        return made
