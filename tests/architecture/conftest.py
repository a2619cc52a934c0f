"""For all tests that read the code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_finalizers_while_parsing() -> Iterator[None]:
    """As while pytest collects, and for the same reason: see ``pytest_collection`` in tests/conftest.py."""
    gc.disable()
    yield
    gc.enable()
