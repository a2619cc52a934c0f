"""The messages between verifier and drafter <-> drafting.proto."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from outrider.internal.v1 import drafting_pb2
from services.links.codec.checks import check_size
from services.links.codec.columns import (
    MOST_NUMBERS,
    numbers_of_draft,
    numbers_of_report,
    numbers_of_sent,
    read_draft_columns,
    read_drafts,
    read_report_columns,
    read_reports,
    write_draft_columns,
    write_drafts,
    write_reports,
)
from services.links.codec.features import decode_features, encode_features
from services.links.codec.same_fields import SameFields
from services.links.codec.trees import decode_tree, write_tree
from speculation import limits
from speculation.columns import DraftColumns, ReportColumns, SentReports
from speculation.errors import InvalidArgument
from speculation.messages import (
    CloseSession,
    Draft,
    DraftFailure,
    DraftingCall,
    DraftingReply,
    DraftNoise,
    FeatureChunk,
    ForgetTenant,
    Forgotten,
    OpenSession,
    StepReport,
)
from speculation.types import HeldNumbers, Observation, SamplingParams

_Kind = TypeVar("_Kind")

# One that only another version knows looks as if there were none.
_KNOWN = "a form that this version knows"
_OPEN = SameFields(OpenSession, drafting_pb2.OpenSession, renamed={"prediction": "prediction_token_ids"}, by_hand=("noise",))
_CLOSE = SameFields(CloseSession, drafting_pb2.CloseSession)
_FORGET = SameFields(ForgetTenant, drafting_pb2.ForgetTenant)
_FORGOTTEN = SameFields(Forgotten, drafting_pb2.Forgotten)
_NOISE = SameFields(DraftNoise, drafting_pb2.DraftNoise)
_STEP = SameFields(StepReport, drafting_pb2.StepReport, by_hand=("observation",))
_DRAFT = SameFields(Draft, drafting_pb2.Draft, by_hand=("tree", "drafting_s"))
_FAILURE = SameFields(DraftFailure, drafting_pb2.DraftFailure)


def encode_drafting_calls(
    calls: Sequence[DraftingCall | SentReports], *, columns: bool = True
) -> Iterator[drafting_pb2.DraftRequest]:
    """Verifier to drafter, in as few messages as possible: reports that follow each other share one.

    Args:
        columns: the drafter reads these; otherwise each call has a message of its own.
    """
    if not columns:
        for call in calls:
            yield from map(encode_drafting_call, call.alone() if isinstance(call, SentReports) else [call])
        return
    for alone, together in _grouped(calls, StepReport, numbers_of_report):
        if alone is not None and not isinstance(alone, SentReports):
            yield encode_drafting_call(alone)
            continue
        if alone is not None and (numbers_of_sent(alone) or MOST_NUMBERS + 1) > MOST_NUMBERS:
            yield from encode_drafting_calls(alone.alone())
            continue
        made = drafting_pb2.DraftRequest()
        write_reports(SentReports.of(together) if alone is None else alone, made.steps)
        yield made


def decode_drafting_calls(wire: drafting_pb2.DraftRequest) -> Sequence[DraftingCall]:
    """Decode a message from verifier to drafter.

    Raises:
        InvalidArgument: no event, or one that breaks a limit.
    """
    return read_reports(wire.steps) if wire.HasField("steps") else [decode_drafting_call(wire)]


def decode_together(wire: drafting_pb2.DraftRequest) -> ReportColumns | Sequence[DraftingCall]:
    """As ``decode_drafting_calls``; where possible, reports that share a message as columns."""
    columns = read_report_columns(wire.steps) if wire.HasField("steps") else None
    return decode_drafting_calls(wire) if columns is None else columns


def encode_drafting_replies(
    replies: Sequence[DraftingReply | DraftColumns], *, columns: bool = True
) -> Iterator[drafting_pb2.DraftResponse]:
    """Drafter to verifier, in as few messages as possible: drafts that follow each other share one.

    Args:
        columns: the verifier reads these; otherwise each reply has a message of its own.
    """
    if not columns:
        yield from map(encode_drafting_reply, each_alone(replies))
        return
    for alone, together in _grouped(replies, Draft, numbers_of_draft):
        if alone is not None and not isinstance(alone, DraftColumns):
            yield encode_drafting_reply(alone)
            continue
        made = drafting_pb2.DraftResponse()
        if alone is not None:
            write_draft_columns(alone, made.drafts)
            yield made
            continue
        write_drafts(together, made.drafts)
        yield made


def decode_drafting_replies(wire: drafting_pb2.DraftResponse) -> Sequence[DraftingReply]:
    """Decode a message from drafter to verifier. A draft that breaks a limit becomes a failure of its session only.

    Raises:
        InvalidArgument: no event.
    """
    return read_drafts(wire.drafts) if wire.HasField("drafts") else [decode_drafting_reply(wire)]


def decode_replies_together(wire: drafting_pb2.DraftResponse) -> DraftColumns | Sequence[DraftingReply]:
    """As ``decode_drafting_replies``; where possible, several drafts that share a message as columns."""
    several = wire.HasField("drafts") and len(wire.drafts.session_ids) > 1
    columns = read_draft_columns(wire.drafts) if several else None
    return decode_drafting_replies(wire) if columns is None else columns


def each_alone(replies: Sequence[DraftingReply | DraftColumns]) -> Iterator[DraftingReply]:
    """Replies with every draft by itself."""
    for reply in replies:
        if isinstance(reply, DraftColumns):
            yield from reply.alone()
        else:
            yield reply


def _grouped(
    messages: Sequence[Any], kind: type[_Kind], numbers: Callable[[_Kind], int | None]
) -> Iterator[tuple[Any | None, list[_Kind]]]:
    """Messages in their order: either one alone, or several that may share one.

    Args:
        kind: those that may.
        numbers: as ``columns.numbers_of_report``.
    """
    together: list[_Kind] = []
    size = 0
    for message in messages:
        own = numbers(message) if type(message) is kind else None
        if together and (own is None or size + own > MOST_NUMBERS):
            yield None, together
            together, size = [], 0
        if own is None:
            yield message, []
        else:
            together.append(message)
            size += own
    if together:
        yield None, together


def encode_drafting_call(message: DraftingCall) -> drafting_pb2.DraftRequest:
    """Verifier to drafter."""
    match message:
        case OpenSession():
            noise = None if message.noise is None else _NOISE.encode(message.noise)
            return drafting_pb2.DraftRequest(open=_OPEN.encode(message, noise=noise))
        case StepReport():
            made = drafting_pb2.DraftRequest(step=_STEP.encode(message))
            if message.observation is not None:
                _write_observation(message.observation, made.step.observation)
            return made
        case CloseSession():
            return drafting_pb2.DraftRequest(close=_CLOSE.encode(message))
        case FeatureChunk():
            chunk = drafting_pb2.FeatureChunk(session_id=message.session_id, features=encode_features(message.features))
            return drafting_pb2.DraftRequest(features=chunk)
        case ForgetTenant():
            return drafting_pb2.DraftRequest(forget=_FORGET.encode(message))


def decode_drafting_call(wire: drafting_pb2.DraftRequest, data: bytes | HeldNumbers | None = None) -> DraftingCall:
    """Decode a message from verifier to drafter.

    Args:
        data: the hidden states' numbers if they are not in the message.

    Raises:
        InvalidArgument: no event, or one that breaks a limit.
    """
    match wire.WhichOneof("event"):
        case "open":
            return _decode_open(wire.open)
        case "step":
            return _decode_step(wire.step, data)
        case "close":
            return _CLOSE.decode(wire.close)
        case "forget":
            return _FORGET.decode(wire.forget)
        case "features":
            return FeatureChunk(session_id=wire.features.session_id, features=decode_features(wire.features.features, data))
        case _:
            raise InvalidArgument("event", "unset", f"{_KNOWN}: open, step, steps, close, features or forget")


def _decode_open(wire: drafting_pb2.OpenSession) -> OpenSession:
    check_size("open.tokens", len(wire.tokens), limits.MAX_SESSION_TOKENS)
    check_size("open.sources", len(wire.sources), limits.MAX_SOURCES)
    check_size("open.max_nodes", wire.max_nodes, limits.MAX_TREE_NODES)
    return _OPEN.decode(wire, noise=_decode_noise(wire.noise) if wire.HasField("noise") else None)


def _decode_noise(wire: drafting_pb2.DraftNoise) -> DraftNoise:
    # Refuses values outside their ranges.
    SamplingParams(seed=wire.seed, top_k=wire.top_k, top_p=wire.top_p, min_p=wire.min_p)
    return _NOISE.decode(wire)


def _decode_step(wire: drafting_pb2.StepReport, data: bytes | HeldNumbers | None) -> StepReport:
    check_size("step.committed", len(wire.committed), limits.MAX_TREE_NODES + 1)
    check_size("step.max_nodes", wire.max_nodes, limits.MAX_TREE_NODES)
    return _STEP.decode(
        wire, observation=_decode_observation(wire.observation, data) if wire.HasField("observation") else None
    )


def _write_observation(observation: Observation, made: drafting_pb2.Observation) -> None:
    made.SetInParent()
    write_tree(observation.tree, made.tree)
    for row in observation.top_ids:
        made.top_ids.add(token_ids=row)
    for row, chances in zip_longest(observation.probe_ids, observation.probe_chances, fillvalue=()):
        made.probe_ids.add(token_ids=row, chances=chances)
    if observation.features is not None:
        made.features.CopyFrom(encode_features(observation.features))


def _decode_observation(wire: drafting_pb2.Observation, data: bytes | HeldNumbers | None) -> Observation:
    features = decode_features(wire.features, data) if wire.HasField("features") else None
    return Observation(
        tree=decode_tree(wire.tree),
        top_ids=_decode_top_ids(wire.top_ids),
        probe_ids=_decode_top_ids(wire.probe_ids),
        probe_chances=_decode_chances(wire.probe_ids),
        features=features,
    )


def _decode_top_ids(rows: Sequence[drafting_pb2.TopIds]) -> tuple[tuple[int, ...], ...]:
    check_size("observation.top_ids", len(rows), limits.MAX_TREE_NODES + 1)
    return tuple([tuple(row.token_ids[:]) for row in rows])


def _decode_chances(rows: Sequence[drafting_pb2.TopIds]) -> tuple[tuple[float, ...], ...]:
    for row in rows:
        check_size("observation.chances", len(row.chances), len(row.token_ids))
    found = tuple([tuple(row.chances[:]) for row in rows])
    return found if any(found) else ()


def encode_drafting_reply(message: DraftingReply) -> drafting_pb2.DraftResponse:
    """Drafter to verifier."""
    if isinstance(message, DraftFailure):
        return drafting_pb2.DraftResponse(failure=_FAILURE.encode(message))
    if isinstance(message, Forgotten):
        return drafting_pb2.DraftResponse(forgotten=_FORGOTTEN.encode(message))
    made = drafting_pb2.DraftResponse(draft=_DRAFT.encode(message, drafting_s=message.drafting_s))
    write_tree(message.tree, made.draft.tree)
    return made


def decode_drafting_reply(wire: drafting_pb2.DraftResponse) -> DraftingReply:
    """Decode a message from drafter to verifier. A draft that breaks a limit becomes a failure of its session only.

    Raises:
        InvalidArgument: no event.
    """
    match wire.WhichOneof("event"):
        case "failure":
            return _FAILURE.decode(wire.failure)
        case "forgotten":
            return _FORGOTTEN.decode(wire.forgotten)
        case "draft":
            draft = wire.draft
            try:
                check_size("draft.assumed", len(draft.assumed), limits.MAX_ASSUMED)
                check_size("draft.group", len(draft.group), limits.MAX_SOURCE_NAME)
                tree = decode_tree(draft.tree)
            except InvalidArgument as error:
                return DraftFailure(session_id=draft.session_id, reason=f"malformed draft: {error}")
            # Only a statistic: an invalid value is no reason to drop the draft.
            drafting_s = draft.drafting_s if 0 <= draft.drafting_s < math.inf else 0.0
            return _DRAFT.decode(draft, tree=tree, drafting_s=drafting_s)
        case _:
            raise InvalidArgument("event", "unset", f"{_KNOWN}: draft, drafts, failure or forgotten")
