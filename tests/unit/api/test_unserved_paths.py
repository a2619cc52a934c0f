"""Paths of other servers are answered with what does the same here, and that exists."""

from __future__ import annotations

import re

import pytest

from services.api.http.operations import OPERATIONS
from services.api.http.unserved_paths import ELSEWHERE, instead_of, unknown_path


def test_none_of_them_is_served() -> None:
    assert ELSEWHERE.keys() & {each.path for each in OPERATIONS} == set()


@pytest.mark.parametrize("path", ELSEWHERE)
def test_what_is_named_exists(path: str) -> None:
    said = instead_of(path)
    assert said is not None and said.startswith(f"there is no {path}: ")
    served = {(each.method.upper(), each.path) for each in OPERATIONS}
    assert set(re.findall(r"(GET|POST) (/\S+)", said)) <= served


def test_what_nobody_knows_is_left_to_the_list_of_paths() -> None:
    assert instead_of("/nowhere") is None and instead_of("/v1/filesystem") is None


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/V1/Models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/nowhere", ""),
    ],
)
def test_the_path_that_is_meant_is_named(path: str, meant: str) -> None:
    served = sorted({each.path for each in OPERATIONS})
    question = f" (did you mean {meant}?)" if meant else ""
    assert unknown_path(path, served).startswith(f"there is no {path}{question}; there are /")


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/files/file-1/content", "/v1/fine_tuning/jobs", "/v1/vector_stores/a/search"]
)
def test_everything_below_a_path_is_told(path: str) -> None:
    assert (instead_of(path) or "").startswith(f"there is no {path}: ")
