"""Asks a gRPC server once: whether it is there, and whether it accepts a token."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from services.links.auth import bearer
from services.links.channel import DIRECT

_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def refuses(address: str, method: str, token: str | None, timeout_s: float = 3.0) -> bool:
    """Whether the server at ``address`` refuses calls with ``token`` (None: without one) as unauthenticated.

    Any other answer, and none within ``timeout_s`` seconds, gives False.

    Args:
        method: the method to call with an empty message, such as "/package.Service/Method".
    """
    return _ask(address, method, token, timeout_s) is grpc.StatusCode.UNAUTHENTICATED


def answers(address: str, method: str, token: str | None, timeout_s: float = 3.0) -> bool:
    """Whether the server at ``address`` gives any answer, a refusal too, within ``timeout_s`` seconds.

    Args:
        method: the method to call with an empty message, such as "/package.Service/Method".
    """
    return _ask(address, method, token, timeout_s) not in _SILENT


def _ask(address: str, method: str, token: str | None, timeout_s: float) -> grpc.StatusCode | None:
    """The status of a call with an empty message; None: it succeeded."""
    with grpc.insecure_channel(address, options=DIRECT) as channel:
        call: Callable[..., object] = channel.unary_unary(method)
        try:
            call(b"", timeout=timeout_s, metadata=bearer(token))
        except grpc.RpcError as error:
            # The error that gRPC raises is also the call, which has a status code.
            return getattr(error, "code", lambda: None)()
    return None
