"""What a process sets before its slow imports, and what it leaves as it is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cluster.process.starting import as_it_was, begin_starting


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize(
    ("given", "looks"),
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "9"}, "9"),
    ],
)
def test_what_a_user_has_set_stays(given: dict[str, str], looks: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    # So that it is as it was afterwards.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    begin_starting()
    assert os.environ.get("GOMP_SPINCOUNT") == looks
    theirs = as_it_was(os.environ)
    assert {name: theirs[name] for name in given} == given
    assert ("GOMP_SPINCOUNT" in theirs) == ("GOMP_SPINCOUNT" in given)


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "first", ["cli.main", "cluster.app", "cluster.ray.deployments", "benchmarks.never_slower.held_service"]
)
def test_it_comes_before_torch(first: str) -> None:
    """libgomp reads it when it is loaded, so that no module whose process calls ``begin_starting`` may import torch at once."""
    code = f"import sys, {first}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
