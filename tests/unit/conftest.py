"""Fixtures of the tests that make or train drafters. They only read what is made here.

What makes it is imported when it is needed: most tests need no model, and transformers' take seconds to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from training.data_manifest import DataManifest


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model, unless a module has a target of its own."""
    from tests.tiny_models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataManifest]:
    """Folder and manifest of training data of that target."""
    from tests.trainings.training_data import make_tiny_data

    folder = tmp_path_factory.mktemp("data") / "shards"
    return folder, make_tiny_data(target, folder)


# Whose states ``deep_data`` hold, besides those behind the final norm.
INNER_LAYERS = (0, 1, 2)


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model of four layers."""
    from tests.tiny_models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def deep_data(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DataManifest]:
    """Folder and manifest of training data of that target, with states of its inner layers."""
    from tests.trainings.training_data import make_tiny_data

    folder = tmp_path_factory.mktemp("deep_data") / "shards"
    return folder, make_tiny_data(deep_target, folder, layers=(*INNER_LAYERS, -1))


@pytest.fixture
def seeded() -> None:
    """What a test draws by torch is the same whichever tests came before it."""
    import torch

    torch.manual_seed(1)
