"""The Triton kernels compile for Ampere and Hopper, which needs no GPU, to their matrix units; the interpreter takes more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from tests.compile_kernels import KERNELS

# Shared memory that a program may have: of an A100, and of an H100.
ROOM = {80: 163 * 1024, 90: 227 * 1024}
LARGE = {"many rows", "many rows of wide heads", "everything", "many products", "gated products", "one product"}
WITH_PRODUCTS = LARGE | {"few rows", "few rows of wide heads", "few products"}
# Not in a loop: nothing to be copied ahead.
WITHOUT_COPIES = {"one product"}


def printed(program: str, tmp_path: Path) -> list[dict[str, Any]]:
    """What a program prints that compiles kernels for each of these compute capabilities."""
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, ROOM)], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(tmp_path: Path) -> None:
    found = printed("tests.compile_kernels", tmp_path)
    assert [one["kernel"] for one in found] == list(KERNELS) * len(ROOM)
    for one in found:
        assert one["shared"] <= ROOM[one["capability"]], one
        assert (one["wgmma"] + one["mma"] > 0) == (one["kernel"] in WITH_PRODUCTS), one
        assert (one["copies"] > 0) == (one["kernel"] in WITH_PRODUCTS - WITHOUT_COPIES), one
        # Hopper's own units take 64 rows at a time; fewer go to those that Ampere has.
        assert (one["wgmma"] > 0) == (one["capability"] == 90 and one["kernel"] in LARGE), one


def test_sums_have_one_order_at_any_number_of_rows(tmp_path: Path) -> None:
    """Of a norm, in the kernels with leaves, with a residual and with neither: lanes are spread over threads in one way."""
    found = printed("tests.compiled_launches", tmp_path)
    for capability in ROOM:
        own = [one for one in found if one["capability"] == capability]
        norms = [one for one in own if one["kernel"] == "add_and_normalise"]
        assert {one["constants"]["LEAVES"] for one in norms if one["constants"]["RESIDUAL"]} == {0, 8}
        heads = [one for one in own if one["kernel"] == "rotate_write" and one["constants"]["NORMED"]]
        assert norms and heads
        assert [len(one["sums"]) for one in (*norms, *heads)] == [1] * (len(norms) + len(heads))
        assert len({one["sums"][0] for one in (*norms, *heads)}) == 1
