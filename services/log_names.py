"""What requests and sessions are called in logs."""

from __future__ import annotations


def log_name(name: str, traceparent: str) -> str:
    """The name of a request or session in logs, with its trace, so that a search for either finds the line."""
    return f"{name} (trace {traceparent})" if traceparent else name
