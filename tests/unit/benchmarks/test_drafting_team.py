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
from tests.drafters.draft_model_sessions import config

target = Path(sys.argv[1])

def made(kernels):
    before = set(os.listdir("/proc/self/task"))
    source.make(config(target, target, draft_kernels=kernels))
    print(len(set(os.listdir("/proc/self/task")) - before))

def count(kernels):
    torch.set_num_threads(2)
    thread = threading.Thread(target=made, args=(kernels,))
    thread.start()
    thread.join()

count(None)
count(by_kernels)
# Last, since it leaves threads behind.
source.use_threads = lambda: None
count(by_kernels)
"""


def further_threads(target: Path) -> list[int]:
    """Threads that are there once the target has been read as its own draft model, and were not before.

    Read by torch, by our kernels, and by these without care for threads.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(target)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    return [int(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for torch to share out the work."""
    grown = tmp_path_factory.mktemp("grown") / "target"
    inflate(tiny_model, grown, width=512, intermediate=1024, layers=2, dtype=torch.float32)
    return grown


@pytest.mark.exhaustive
def test_a_draft_model_is_read_without_a_team_of_threads(target: Path) -> None:
    torch_alone, kernels, careless = further_threads(target)
    assert (torch_alone, kernels) == (0, 0)
    # A team would be noticed.
    assert careless > 0
