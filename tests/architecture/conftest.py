"""For all tests that parse the code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.running.finalizers import no_finalizers


@pytest.fixture(autouse=True)
def parsed_without_finalizers() -> Iterator[None]:
    with no_finalizers():
        yield
