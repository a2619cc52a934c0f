"""Malformed and unlikely gRPC messages for every method of every service, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from outrider.internal.v1 import drafting_pb2, retrieval_pb2, verification_pb2
from outrider.v1 import generation_pb2 as pb

Code = grpc.StatusCode
# What a server may answer to bad input; anything else (INTERNAL, UNKNOWN, UNAVAILABLE, CANCELLED) would be its own failure.
EXPECTED = frozenset(
    {Code.OK, Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.NOT_FOUND, Code.RESOURCE_EXHAUSTED, Code.UNIMPLEMENTED}
)
NUMBERS = (0.0, -0.0, 1.0, 0.5, 1e-38, 1e-300, 1e308, -1.0, 2.0, 10.0, 0.01, float("nan"), float("inf"), float("-inf"))
WHOLE = (0, 1, 2, 3, 4, 255, 511, 512, 513, 2**31 - 1, 2**32 - 1)
TEXTS = ("", "fox", "\x00", "\ud7ff\ufffd", "a" * 300, "é" * 40, "<|im_end|>", "{{ 7 }}", "日本" * 9, "\u202e\u0301")
STRATEGIES = ("autoregressive", "prompt_lookup", "suffix", "recycling", "blend", "auto", "lookahead", "magic", "")
_F = FieldDescriptor


@dataclass(frozen=True, slots=True)
class Method:
    """A method, who serves it, and what it takes; ``streams``: it takes and gives streams."""

    server: str
    path: str
    takes: type[Message]
    streams: bool = False
    gives_stream: bool = False


METHODS = (
    Method("public", "/outrider.v1.GenerationService/Generate", pb.GenerateRequest, gives_stream=True),
    Method("public", "/outrider.v1.GenerationService/ListModels", pb.ListModelsRequest),
    Method("public", "/outrider.v1.GenerationService/Forget", pb.ForgetRequest),
    Method("public", "/outrider.v1.GenerationService/Nothing", pb.ForgetRequest),
    Method("public", "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest),
    Method(
        "verifier", "/outrider.internal.v1.VerificationService/Verify", verification_pb2.VerifyRequest, gives_stream=True
    ),
    Method("verifier", "/outrider.internal.v1.VerificationService/Describe", verification_pb2.DescribeRequest),
    Method("verifier", "/outrider.internal.v1.VerificationService/Forget", verification_pb2.ForgetRequest),
    Method("drafter", "/outrider.internal.v1.DraftingService/Draft", drafting_pb2.DraftRequest, streams=True),
    Method("drafter", "/outrider.internal.v1.DraftingService/Describe", drafting_pb2.DraftingServiceDescribeRequest),
    Method("retrieval", "/outrider.internal.v1.RetrievalService/Retrieve", retrieval_pb2.RetrieveRequest, streams=True),
)
# Half of all messages go to the method that does most with them.
_WEIGHTS = [10, 1, 1, 1, 1, 5, 1, 1, 4, 1, 2]


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to a method, and what may come back."""

    method: Method
    messages: tuple[bytes, ...]
    kind: str
    allowed: frozenset[Code]


def call(source: random.Random) -> Call:
    """The next call."""
    method = source.choices(METHODS, _WEIGHTS)[0]
    kind, data = _message(source, method.takes)
    allowed = EXPECTED
    if method.path.endswith("Nothing"):
        allowed = frozenset({Code.UNIMPLEMENTED})
    elif not _readable(method.takes, data):
        allowed = frozenset({Code.INVALID_ARGUMENT})
    elif method.path.endswith("Forget"):
        # It says so if somebody has not confirmed in time, which depends on the machine's load.
        allowed = EXPECTED | {Code.UNAVAILABLE}
    elif method.path.endswith("VerificationService/Describe"):
        # It says so while a pass is overdue, which depends on it too.
        allowed = EXPECTED | {Code.UNAVAILABLE}
    return Call(method, (data,) * (source.choice((1, 1, 3)) if method.streams else 1), kind, allowed)


async def status_of(channel: grpc.aio.Channel, made: Call, timeout_s: float = 60) -> tuple[Code, str]:
    """How the call ends, and with which words."""
    method: Any
    try:
        if made.method.streams:
            method = channel.stream_stream(made.method.path)
            async for _ in method(iter(made.messages), timeout=timeout_s):
                pass
        elif made.method.gives_stream:
            method = channel.unary_stream(made.method.path)
            async for _ in method(made.messages[0], timeout=timeout_s):
                pass
        else:
            method = channel.unary_unary(made.method.path)
            await method(made.messages[0], timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        # The server has ended the call while this side was still writing to it, whose own library gives up then.
        if error.details() == "Internal error from Core" and len(made.messages) > 1:
            return await status_of(channel, replace(made, messages=made.messages[:1]), timeout_s)
        return error.code(), error.details() or ""
    return Code.OK, ""


def _readable(kind: type[Message], data: bytes) -> bool:
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True


def _message(source: random.Random, kind: type[Message]) -> tuple[str, bytes]:
    share = source.random()
    if share < 0.1:
        return "random bytes", source.randbytes(source.choice((0, 1, 2, 7, 50, 500)))
    made = likely(source) if kind is pb.GenerateRequest and share < 0.7 else filled(source, kind())
    data = bytearray(made.SerializeToString())
    if source.random() < 0.4:
        return "unlikely values", bytes(data)
    damage = source.choice(DAMAGES)
    damage(source, data, kind)
    return damage.__name__.strip("_").replace("_", " "), bytes(data)


def likely(source: random.Random) -> pb.GenerateRequest:
    """A request whose fields hold likely and unlikely values."""
    made = pb.GenerateRequest()
    match source.randrange(8):
        case 0 | 1 | 2:
            made.prompt = source.choice(TEXTS)
        case 3 | 4:
            made.prompt_token_ids.ids.extend(source.choice((5, 3, 31, 99, 2**32 - 1)) for _ in range(source.randrange(6)))
        case 5 | 6:
            for _ in range(source.randrange(4)):
                role = source.choice(("user", "system", "assistant", "", "tool", "x" * 90))
                made.messages.messages.add(role=role, content=source.choice(TEXTS))
    sampling = made.sampling
    # Answers stay short where nothing says otherwise.
    sampling.max_tokens = source.choice((1, 2, 4)) if source.random() < 0.9 else source.choice(WHOLE)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if source.random() < 0.2:
            setattr(sampling, name, source.choice(NUMBERS))
    for name in ("top_k", "min_tokens", "logprobs"):
        if source.random() < 0.15:
            setattr(sampling, name, source.choice(WHOLE))
    if source.random() < 0.2:
        sampling.stop.extend(source.choice(TEXTS) for _ in range(source.randrange(20)))
    if source.random() < 0.2:
        sampling.logit_bias[source.choice(WHOLE)] = source.choice(NUMBERS)
    if source.random() < 0.1:
        sampling.stop_token_ids.append(source.choice(WHOLE))
    if source.random() < 0.5:
        made.speculation.strategy = source.choice(STRATEGIES)
    if source.random() < 0.05:
        made.speculation.sources.extend(source.choice(STRATEGIES) for _ in range(source.randrange(20)))
    if source.random() < 0.2:
        made.speculation.num_speculative_tokens = source.choice(WHOLE)
    if source.random() < 0.1:
        made.speculation.acceptance = source.choice(("walk", "rejection", "", "maybe"))
    if source.random() < 0.05:
        made.model = source.choice(("tiny", "gpt-9", "", "x" * 9000))
    return made


def filled(source: random.Random, made: Message, depth: int = 0) -> Message:
    """``made`` with values in some of its fields, whatever they are."""
    for field in made.DESCRIPTOR.fields:
        if source.random() < 0.6:
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            key, value = field.message_type.fields
            if value.message_type is None:
                getattr(made, field.name)[_scalar(source, key)] = _scalar(source, value)
        elif field.message_type is not None:
            if depth < 4:
                for _ in range(source.randrange(3) if field.is_repeated else 1):
                    inner = getattr(made, field.name)
                    filled(source, inner.add() if field.is_repeated else inner, depth + 1)
        elif field.is_repeated:
            getattr(made, field.name).extend(_scalar(source, field) for _ in range(source.randrange(5)))
        else:
            setattr(made, field.name, _scalar(source, field))
    return made


def _scalar(source: random.Random, field: FieldDescriptor) -> Any:
    if field.type == _F.TYPE_STRING:
        return source.choice(TEXTS)
    if field.type == _F.TYPE_BYTES:
        return source.randbytes(source.choice((0, 1, 4, 64)))
    if field.type == _F.TYPE_BOOL:
        return source.random() < 0.5
    if field.type == _F.TYPE_ENUM:
        return source.choice((0, 1, 2, 7, 2**31 - 1, -1))
    if field.type == _F.TYPE_DOUBLE:
        return source.choice(NUMBERS)
    if field.type == _F.TYPE_FLOAT:
        return source.choice([number for number in NUMBERS if abs(number) != 1e308])
    if field.type in (_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32):
        return source.choice((0, 1, -1, 2**31 - 1, -(2**31)))
    if field.type in (_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64):
        return source.choice((0, 1, -1, 2**63 - 1, -(2**63)))
    return source.choice(WHOLE)


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _number(source: random.Random, kind: type[Message]) -> int:
    """Of one of the message's fields, or of none."""
    numbers = [field.number for field in kind.DESCRIPTOR.fields] or [1]
    return source.choice((*numbers, 1, 1000))


def _flipped_bits(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    for _ in range(source.randint(1, 4) if data else 0):
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def _other_bytes(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    for _ in range(source.randint(1, 4) if data else 0):
        data[source.randrange(len(data))] = source.randrange(256)


def _cut_off(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    del data[source.randrange(len(data) + 1) :]


def _wrong_wire_type(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    data += _varint(_number(source, kind) << 3 | source.randrange(8)) + source.randbytes(source.choice((0, 1, 4, 8)))


def _huge_length(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    data += (
        _varint(_number(source, kind) << 3 | 2) + _varint(source.choice((2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1))) + b"x"
    )


def _invalid_utf8(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    text = source.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"ok\x80"))
    data += _varint(_number(source, kind) << 3 | 2) + _varint(len(text)) + text


def _enum_out_of_range(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    data += _varint(_number(source, kind) << 3) + _varint(source.choice((99, 2**31 - 1, 2**32, 2**64 - 1)))


def _deep_nesting(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    if source.random() < 0.5:
        data += _varint(_number(source, kind) << 3 | 3) * source.choice((50, 200, 5000))
        return
    inner, number = b"", _number(source, kind)
    for _ in range(source.choice((20, 99, 101, 300))):
        inner = _varint(number << 3 | 2) + _varint(len(inner)) + inner
    data += inner


def _overlong_varint(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    data += _varint(_number(source, kind) << 3) + b"\xff" * source.choice((9, 10, 11, 40)) + b"\x01"


def _said_twice(source: random.Random, data: bytearray, kind: type[Message]) -> None:
    data += bytes(data)


DAMAGES: tuple[Callable[[random.Random, bytearray, type[Message]], None], ...] = (
    _flipped_bits, _other_bytes, _cut_off, _wrong_wire_type, _huge_length, _invalid_utf8, _enum_out_of_range, _deep_nesting,
    _overlong_varint, _said_twice,
)  # fmt: skip
