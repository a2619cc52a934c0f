"""What keeps experiments alive in `make test`: they can be imported. Their own tests run in `make test-all`."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import lab


@pytest.mark.parametrize("name", [module.name for module in pkgutil.walk_packages(lab.__path__, "lab.")])
def test_an_experiment_can_be_imported(name: str) -> None:
    if not name.endswith("__main__"):
        assert importlib.import_module(name).__doc__
