"""Fixtures of the tests that train drafters. They only read what is made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny_model
from tests.training_data import make_tiny_data
from training.shards import DataManifest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model, unless a module has a target of its own."""
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataManifest]:
    """Folder and manifest of training data of that target."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    return folder, make_tiny_data(target, folder)
