"""Fixtures that several suites share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
