"""One service with both public servers for all tests that only ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_service import HttpService, http_served


@pytest.fixture(scope="session")
def both_entries(tiny_model: Path) -> Iterator[HttpService]:
    with http_served(tiny_model) as service:
        yield service
