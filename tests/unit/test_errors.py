"""The one table from error to gRPC status to HTTP code: complete, and it survives every way between processes."""

from __future__ import annotations

import pickle

import grpc
import pytest

from services.statuses import STATUS, status_of
from speculation import errors
from speculation.errors import InvalidArgument, OutriderError, ResourceExhausted


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


# Servers have some of their own beside them.
ALL = sorted(
    (cls for cls in subclasses(OutriderError) - {OutriderError} if cls.__module__ == errors.__name__),
    key=lambda cls: cls.__name__,
)


def make(cls: type[OutriderError]) -> OutriderError:
    return cls("field", "value", "allowed") if issubclass(cls, InvalidArgument) else cls("message")


def test_every_error_has_a_status() -> None:
    assert {cls for cls in ALL if cls.__module__ == errors.__name__} == set(STATUS)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_statuses_exist(cls: type[OutriderError]) -> None:
    status = status_of(make(cls))
    assert status.grpc in grpc.StatusCode.__members__
    assert 400 <= status.http < 600


def test_what_was_not_raised_on_purpose_is_internal() -> None:
    assert status_of(ValueError("x")) == STATUS[errors.Internal]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_errors_survive_a_trip_between_processes(cls: type[OutriderError]) -> None:
    error = make(cls)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_messages_name_field_value_and_limit() -> None:
    assert str(InvalidArgument("top_p", 2, "from 0 to 1")) == "top_p is 2: must be from 0 to 1"
    assert len(InvalidArgument("prompt", "x" * 1000, "short").value) == 80
    assert ResourceExhausted("full", 2.5).retry_after_s == 2.5
