"""Keys in calls' metadata, and the token that components share, checked on every call. A server stores only its hash."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
from typing_extensions import override

from services.access.key_records import hash_key
from services.access.refused_components import RefusedComponents
from services.links.status import Context, abort
from speculation.errors import Unauthenticated

_SCHEME = "Bearer "


def bearer(key: str | None) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries ``key``."""
    return (("authorization", _SCHEME + key),) if key else ()


def bearer_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The API key in a call's metadata."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str) and value.startswith(_SCHEME):
            return value.removeprefix(_SCHEME)
    return None


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token that components share.

    Args:
        token_hash: its SHA-256, in hex.
        refused: where refused calls are told.
    """

    def __init__(self, token_hash: str, refused: RefusedComponents) -> None:
        self._token_hash = token_hash
        self._refused = refused

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        shown = bearer_of(handler_call_details.invocation_metadata)
        if handler is None or (shown is not None and hmac.compare_digest(hash_key(shown), self._token_hash)):
            return handler
        return _refusing("no_token" if shown is None else "unknown_token", self._refused)


def _refusing(reason: str, refused: RefusedComponents) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that refuses every call, without its message: gRPC would wait for one before it runs a unary method."""
    error = Unauthenticated("no valid API key: send metadata 'authorization: Bearer KEY'")

    async def refuse(_messages: object, context: Context) -> None:
        refused.note(reason, context.peer())
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
