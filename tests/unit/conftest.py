"""Fixtures of the tests that train drafters. They only read what is made here.

What makes it is imported when it is needed: most tests need no model, and transformers' take seconds to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from training.shards import DataManifest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model, unless a module has a target of its own."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataManifest]:
    """Folder and manifest of training data of that target."""
    from tests.training_data import make_tiny_data

    folder = tmp_path_factory.mktemp("data") / "shards"
    return folder, make_tiny_data(target, folder)
