"""The one table from error to gRPC status to HTTP code: complete, and it survives every way between processes."""

from __future__ import annotations

import pickle
from typing import Any

import grpc
import pytest

from services.statuses import STATUS, status_of
from speculation import errors
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, ResourceExhausted, quoted, spelled
from speculation.types import SamplingParams


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
    assert set(ALL) == set(STATUS)


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


def test_a_number_that_may_have_decimals_is_no_whole_one() -> None:
    for given, allowed in (
        ({"temperature": -1}, "a finite number from 0.001 to 100, or 0"),
        ({"top_p": 2}, "a finite number above 0, at most 1"),
        ({"presence_penalty": 3}, "a finite number from -2 to 2"),
        ({"top_k": -1}, "a whole number from 0 to 4294967295"),
        ({"seed": -1}, "a whole number from 0 to 18446744073709551615"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            SamplingParams(**given)
        assert caught.value.allowed == allowed


def test_values_are_spelled_as_requests_and_files_have_them() -> None:
    """Whoever sends JSON, or writes YAML, has no None and no True."""
    assert str(InvalidArgument("strict", True, "unset")) == "strict is true: must be unset"
    assert str(InvalidArgument("tools", [{"strict": False}, None], "a mapping")).startswith(
        "tools is [{'strict': false}, null]:"
    )
    assert str(ConfigurationError(field="page", value=False, allowed="true")) == "page is false: must be true"
    # Texts that look so stay as they were written.
    assert str(InvalidArgument("stop", "None", "another")) == "stop is None: must be another"
    assert (quoted("true"), quoted(True), quoted(1), quoted({"a": None})) == ("'true'", "true", "1", "{'a': null}")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"field": "stages", "value": 0, "allowed": "at least 1"}, "stages is 0: must be at least 1"),
        ({"field": "--keep", "verb": "", "value": 2, "allowed": "at most 1"}, "--keep 2: must be at most 1"),
        (
            {"field": "dtype", "value": "fp8", "given": "which needs a GPU", "allowed": "int8"},
            "dtype is fp8, which needs a GPU: must be int8",
        ),
        ({"why": "not JSON", "field": "a.json", "place": "--data"}, "--data: a.json: not JSON"),
        ({"why": "no index", "field": "model", "value": None}, "model is null: no index"),
        ({"why": "a.json holds nothing", "about": "a.json"}, "a.json holds nothing"),
    ],
)
def test_refused_settings_are_said_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    error = ConfigurationError(**given)
    assert str(error) == sentence
    assert error.field == given.get("field", given.get("about"))
    assert error.value == (spelled(given["value"]) if "value" in given else "")
    assert error.allowed == given.get("allowed", "")
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
