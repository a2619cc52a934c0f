"""Models that draft have one thread: a second team of OpenMP threads in a process halves the speed of the target's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.inflate import inflate

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")

# In a process of its own: OpenMP keeps a team as long as its thread lives.
_PROGRAM = """
import os, sys, threading
from pathlib import Path
import torch
from cluster.models.drafters import by_kernels
from services.drafter.draft_model import source
from tests.draft_model_sessions import config

torch.set_num_threads(2)
target, kernels, planted = Path(sys.argv[1]), sys.argv[2] == "kernels", sys.argv[3] == "planted"
if planted:
    source.use_threads = lambda count: None
counted = []

def made():
    before = len(os.listdir("/proc/self/task"))
    source.make(config(target, target, draft_kernels=by_kernels if kernels else None))
    counted.append(len(os.listdir("/proc/self/task")) - before)

thread = threading.Thread(target=made)
thread.start()
thread.join()
print(*counted)
"""


def further_threads(target: Path, *how: str) -> int:
    """Threads that are there once the target has been read as its own draft model, and were not before."""
    program = [sys.executable, "-c", _PROGRAM, str(target), *how]
    return int(subprocess.run(program, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout)


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for torch to share out the work."""
    grown = tmp_path_factory.mktemp("grown") / "target"
    inflate(tiny_model, grown, width=512, intermediate=1024, layers=2, dtype=torch.float32)
    return grown


@pytest.mark.exhaustive
@pytest.mark.parametrize("over", ["torch", "kernels"])
def test_a_draft_model_is_read_without_a_team_of_threads(target: Path, over: str) -> None:
    assert further_threads(target, over, "") == 0


@pytest.mark.exhaustive
def test_a_team_is_noticed(target: Path) -> None:
    assert further_threads(target, "kernels", "planted") > 0
