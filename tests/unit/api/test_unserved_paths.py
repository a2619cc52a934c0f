"""Paths of other servers are answered with what does the same here, and that exists."""

from __future__ import annotations

import re

import pytest

from services.api.http.operations import OPERATIONS
from services.api.http.unserved_paths import ELSEWHERE, instead_of


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
    "path", ["/v1/files", "/v1/files/file-1/content", "/v1/fine_tuning/jobs", "/v1/vector_stores/a/search"]
)
def test_everything_below_a_path_is_told(path: str) -> None:
    assert (instead_of(path) or "").startswith(f"there is no {path}: ")
