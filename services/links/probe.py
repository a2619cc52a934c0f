"""Asks a gRPC server whether it lets us in, before something that asks again and again does."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from services.links.auth import bearer


def refuses(address: str, method: str, token: str | None, timeout_s: float = 3.0) -> bool:
    """Whether the server at ``address`` refuses calls with ``token`` (None: without any). Other answers do not count.

    Args:
        method: of the server, as in "/package.Service/Method"; it is called with an empty message.
    """
    with grpc.insecure_channel(address) as channel:
        call: Callable[..., object] = channel.unary_unary(method)
        try:
            call(b"", timeout=timeout_s, metadata=bearer(token))
        except grpc.RpcError as error:
            # What a call raises is its state as well.
            code = getattr(error, "code", lambda: None)()
            return code is grpc.StatusCode.UNAUTHENTICATED
    return False
