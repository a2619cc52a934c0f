"""Client for Outrider, a lossless speculative-decoding service.

::

    from outrider import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64).text)
        for chunk in client.stream(messages=[{"role": "user", "content": "Hello!"}]):
            print(chunk.text, end="", flush=True)
"""

from importlib.metadata import PackageNotFoundError, version

from outrider._transport import Retry
from outrider.aio import AsyncClient, AsyncStream
from outrider.client import Client, Stream
from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    OutriderError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from outrider.requests import Acceptance, Message, Options, Privacy, Report, Strategy, StructuredOutputs
from outrider.types import (
    Chunk,
    Comparison,
    DroppedNodes,
    Generation,
    Logprob,
    Model,
    NameableDrafter,
    PassReport,
    Reloaded,
    ServedWeights,
    SpeculativeDecoding,
    Timing,
    TokenLogprobs,
    TokenOrigin,
    Usage,
)

__all__ = [
    "Acceptance",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Comparison",
    "DeadlineExceeded",
    "DroppedNodes",
    "FailedPrecondition",
    "Generation",
    "InternalError",
    "InvalidArgument",
    "Logprob",
    "Message",
    "Model",
    "NameableDrafter",
    "NotFound",
    "Options",
    "OutriderError",
    "PassReport",
    "PermissionDenied",
    "Privacy",
    "Reloaded",
    "Report",
    "ResourceExhausted",
    "Retry",
    "ServedWeights",
    "SpeculativeDecoding",
    "Strategy",
    "Stream",
    "StructuredOutputs",
    "Timing",
    "TokenLogprobs",
    "TokenOrigin",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "__version__",
]

try:
    __version__ = version("outrider")
except PackageNotFoundError:
    # A checkout that is only on the path, not installed.
    __version__ = "unknown"
