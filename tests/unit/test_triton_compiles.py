"""The Triton kernels compile for Ampere and Hopper, which needs no GPU, to their matrix units; the interpreter takes more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tests.compile_kernels import KERNELS

# Shared memory that a program may have: of an A100, and of an H100.
ROOM = {80: 163 * 1024, 90: 227 * 1024}
LARGE = {"many rows", "everything", "many products", "gated products", "one product"}
WITH_PRODUCTS = LARGE | {"few rows", "few products"}


def test_every_kernel_compiles(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", *map(str, ROOM)], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["kernel"] for one in found] == list(KERNELS) * len(ROOM)
    for one in found:
        assert one["shared"] <= ROOM[one["capability"]], one
        assert (one["wgmma"] + one["mma"] > 0) == (one["kernel"] in WITH_PRODUCTS), one
        # Hopper's own units take 64 rows at a time; fewer go to those that Ampere has.
        assert (one["wgmma"] > 0) == (one["capability"] == 90 and one["kernel"] in LARGE), one
