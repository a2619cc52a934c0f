"""``Features`` (hidden states) <-> drafting.proto, and their division into messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outrider.internal.v1 import drafting_pb2
from services.links.codec.checks import check_size
from services.links.codec.same_fields import SameFields
from speculation import limits
from speculation.columns import ReportColumns, SentReports
from speculation.errors import InvalidArgument
from speculation.messages import DraftingCall, FeatureChunk, StepReport
from speculation.types import Features, HeldNumbers

NUMBER_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_FEATURES = SameFields(Features, drafting_pb2.Features, by_hand=("data",))


def encode_features(features: Features) -> drafting_pb2.Features:
    """The message for hidden states. Those that another device holds are fetched."""
    return _FEATURES.encode(features, data=bytes(features.data))


def decode_features(wire: drafting_pb2.Features, data: bytes | HeldNumbers | None = None) -> Features:
    """Decode hidden states and check all limits.

    Args:
        data: the numbers if they are not in the message: within one process they are passed by reference.

    Raises:
        InvalidArgument: the number of bytes does not match the shape, or a limit is broken; names the field.
    """
    if wire.dtype not in NUMBER_BYTES:
        raise InvalidArgument("features.dtype", wire.dtype, f"one of {', '.join(NUMBER_BYTES)}")
    if not wire.rows or not wire.width:
        raise InvalidArgument("features", f"{wire.rows} x {wire.width}", "at least one row and one number")
    if wire.width > limits.MAX_FEATURE_WIDTH:
        raise InvalidArgument("features.width", wire.width, f"at most {limits.MAX_FEATURE_WIDTH}")
    if wire.start + wire.rows > limits.MAX_SESSION_TOKENS:
        end = f"rows of the positions to {wire.start + wire.rows}"
        raise InvalidArgument("features.rows", end, f"at most to {limits.MAX_SESSION_TOKENS}")
    check_size("features.layers", len(wire.layers), limits.MAX_LAYERS)
    if wire.layers and wire.width % len(wire.layers):
        raise InvalidArgument("features.width", wire.width, f"a multiple of the number of layers, {len(wire.layers)}")
    if data is None:
        data = wire.data
        check_size("features.data", len(data), limits.MAX_FEATURE_BYTES)
    expected = wire.rows * wire.width * NUMBER_BYTES[wire.dtype]
    if len(data) != expected:
        raise InvalidArgument("features.data", f"{len(data)} bytes", f"{expected}: {wire.rows} x {wire.width} numbers")
    return _FEATURES.decode(wire, data=data)


def features_of(call: DraftingCall | ReportColumns | SentReports) -> Features | None:
    """The hidden states that ``call`` carries, if any."""
    match call:
        case FeatureChunk():
            return call.features
        case StepReport(observation=observation) if observation is not None:
            return observation.features
        case _:
            return None


def with_features(step: StepReport, features: Features | None) -> StepReport:
    """``step`` with other hidden states in place of its own."""
    assert step.observation is not None
    return replace(step, observation=replace(step.observation, features=features))


def detach_data(call: DraftingCall) -> tuple[DraftingCall, bytes | HeldNumbers | None]:
    """``call`` without the numbers of its hidden states, and those numbers (None: it has none)."""
    features = features_of(call)
    match call:
        case StepReport() if features is not None:
            return with_features(call, replace(features, data=b"")), features.data
        case FeatureChunk():
            return replace(call, features=replace(call.features, data=b"")), call.features.data
        case _:
            return call, None


def in_messages(call: DraftingCall | ReportColumns) -> Iterator[DraftingCall]:
    """Split ``call`` into calls that each fit into a message.

    Hidden states too large for one message are sent ahead in chunks. A step report comes last, with the last chunk.
    """
    if isinstance(call, ReportColumns):
        yield from call.alone()
        return
    features = features_of(call)
    large = features is not None and len(features.data) > limits.MAX_FEATURE_BYTES
    if features is None or not large or not isinstance(call, StepReport | FeatureChunk):
        yield call
        return
    # A row too large for a message gives no pieces: such hidden states are dropped, and sources do without them.
    pieces = split(features, limits.MAX_FEATURE_BYTES)
    last = pieces.pop() if pieces and isinstance(call, StepReport) else None
    for piece in pieces:
        yield FeatureChunk(session_id=call.session_id, features=piece)
    if isinstance(call, StepReport):
        yield with_features(call, last)


def split(features: Features, most_bytes: int) -> list[Features]:
    """Split ``features`` into pieces of whole rows, in order, of at most ``most_bytes`` each; [] if one row is larger."""
    row = len(features.data) // features.rows
    rows = most_bytes // row
    if not rows:
        return []
    return [features.part(first, min(first + rows, features.rows)) for first in range(0, features.rows, rows)]
