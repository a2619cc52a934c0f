"""Fixtures that several suites share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model

# What command lines under test learn of tiny models' sources is of no use to whoever runs the tests.
os.environ.setdefault("OUTRIDER_DRAFTER__KEEP_CALIBRATION", "false")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
