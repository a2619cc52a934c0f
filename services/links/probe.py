"""Asks a gRPC server once whether it accepts a token, before a client that retries for ever connects to it."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from services.links.auth import bearer


def refuses(address: str, method: str, token: str | None, timeout_s: float = 3.0) -> bool:
    """Whether the server at ``address`` refuses calls with ``token`` (None: without one) as unauthenticated.

    Any other answer, and none within ``timeout_s`` seconds, gives False.

    Args:
        method: the method to call with an empty message, such as "/package.Service/Method".
    """
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., object] = channel.unary_unary(method)
        try:
            call(b"", timeout=timeout_s, metadata=bearer(token))
        except grpc.RpcError as error:
            # The error that gRPC raises is also the call, which has a status code.
            code = getattr(error, "code", lambda: None)()
            return code is grpc.StatusCode.UNAUTHENTICATED
    return False
