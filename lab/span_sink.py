"""A collector of traces that takes all spans and keeps none, for benchmarks of what tracing costs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from typing_extensions import override


class _TakesAll(grpc.GenericRpcHandler):
    """Answers every call with an empty message, which is OTLP's word for success."""

    @override
    def service(self, details: Any) -> Any:
        del details
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@contextmanager
def span_sink() -> Iterator[str]:
    """A collector during the block; yields its URL."""
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    server.add_generic_rpc_handlers((_TakesAll(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
