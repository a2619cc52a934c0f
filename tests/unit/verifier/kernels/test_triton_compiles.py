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
import triton

from tests.kernels import compiled_resources
from tests.kernels.compile_kernels import KERNELS

# One process, since tests share what is compiled.
pytestmark = pytest.mark.xdist_group("triton compiles")

# Shared memory that a program may have: of an A100, and of an H100.
ROOM = {80: 163 * 1024, 90: 227 * 1024}
LARGE = {
    "many rows",
    "many rows of bytes",
    "many rows of wide heads",
    "everything",
    "many products",
    "gated products",
    "one product",
}
LARGE |= {"many products of fp8", "gated products of fp8", "many products of int8"}
LARGE |= {"many pairs", "many pairs with biases", "gated pairs", "gated pairs of fp8"}
# In float32, which matrix units would round.
WITHOUT_UNITS = {"few products of a router", "many products of a router"}
WITH_PRODUCTS = (
    LARGE | WITHOUT_UNITS | {"few rows", "few rows of bytes", "few rows of wide heads", "few products", "some products"}
)
WITH_PRODUCTS |= {"few products of fp8", "few products of int8", "some products of fp8"}
WITH_PRODUCTS |= {"few pairs", "few pairs with biases", "some pairs", "few pairs of fp8", "few pairs of int8"}
ATTENTION = {
    "few rows",
    "many rows",
    "few rows of bytes",
    "many rows of bytes",
    "few rows of wide heads",
    "many rows of wide heads",
    "everything",
}
# Bytes of a thread's stack, at most: what these spill is not mended yet. All others have their numbers in registers.
SPILLED = {"many rows of bytes": 392, "many rows of wide heads": 592, "everything": 288,
           "many products of a router": 512, "many products of fp8": 24, "many products of int8": 24}  # fmt: skip
# Not in a loop: nothing to be copied ahead.
WITHOUT_COPIES = {"one product"}


# What is compiled in `make test`: a product and a norm.
SAMPLE = ("few products", "norm of leaves")
# Bytes of a thread's stack, at most, in layers of large models, by kernel and rows of a group: attention of decoding, outside
# of its loops with products; 3.9 gives one product fewer registers than there are.
SPILLED_IN_LAYERS = {("attend", "BLOCK=16"): 32, ("multiply", "ROWS=16"): 8}


def printed(program: str, tmp_path: Path, *asked: object) -> list[dict[str, Any]]:
    """What a program prints that compiles kernels: for each compute capability of ``ROOM``, or what is asked for."""
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, asked or ROOM)], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module", params=ROOM)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For one compute capability: for both, a slow machine would take longer than a test may."""
    return printed("tests.kernels.compile_kernels", tmp_path_factory.mktemp("kernels"), request.param)


@pytest.mark.exhaustive
def test_every_kernel_compiles(kernels: list[dict[str, Any]]) -> None:
    assert [one["kernel"] for one in kernels] == list(KERNELS)
    for one in kernels:
        assert one["shared"] <= ROOM[one["capability"]], one
        assert (one["wgmma"] + one["mma"] > 0) == (one["kernel"] in WITH_PRODUCTS - WITHOUT_UNITS), one
        assert (one["copies"] > 0) == (one["kernel"] in WITH_PRODUCTS - WITHOUT_COPIES), one
        assert one["stack"] <= SPILLED.get(one["kernel"], 0), one
        # Keys and values are read 16 bytes at a time.
        assert one["halves"] == 0 or one["kernel"] not in ATTENTION, one
        # Of each of sixteen segments its maximum, its sum of weights and its weighted sum.
        assert one["ahead"] >= 3 * 16 or not one["kernel"].startswith("merge"), one
        # So that the terms of a sum keep their order: sixteen of them form a group on the units.
        assert set(one["widths"]) <= {2}, one
        # Hopper's own units take 64 rows at a time; fewer go to those that Ampere has.
        assert (one["wgmma"] > 0) == (one["capability"] == 90 and one["kernel"] in LARGE), one


def known(group: str) -> dict[str, dict[str, int]]:
    """What kernels take by tests/kernels/compiled_resources.json, under the Triton that is installed."""
    section = compiled_resources.known().get(triton.__version__)
    if section is None:
        pytest.skip(f"nothing is kept of Triton {triton.__version__}: python -m tests.kernels.compiled_resources --write")
    return section[group]


def figures(found: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    return {one["kernel"]: {name: one[name] for name in ("registers", "stack", "copies", "shared")} for one in found}


def test_a_sample_takes_what_is_kept_of_it(tmp_path: Path) -> None:
    kept = known("kernels")
    found = figures(printed("tests.kernels.compiled_resources", tmp_path, "kernels", "--kernels", *SAMPLE))
    assert found == {name: kept[name] for name in SAMPLE}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernels", [compiled_resources.HOPPER], indirect=True)
def test_every_kernel_takes_what_is_kept_of_it(kernels: list[dict[str, Any]]) -> None:
    """If a change means to take something else: ``python -m tests.kernels.compiled_resources --write``, under each Triton kept there."""
    assert figures(kernels) == known("kernels")


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", compiled_resources.SHAPES)
def test_layers_of_large_models_take_what_is_kept_of_them(shape: str, tmp_path: Path) -> None:
    kept = known(shape)
    assert figures(printed("tests.kernels.compiled_resources", tmp_path, shape)) == kept


def test_what_is_kept_is_of_the_kernels_and_shapes_that_there_are() -> None:
    sections = compiled_resources.known()
    # A bare machine's, the image's, and that of the tests.
    assert {"3.6.0", "3.7.1", "3.9.0"} <= set(sections)
    for section in sections.values():
        assert list(section) == list(compiled_resources.GROUPS) and list(section["kernels"]) == list(KERNELS)
        # Constants decide what is compiled, whatever compiles it.
        assert {group: list(kernels) for group, kernels in section.items()} == {
            group: list(kernels) for group, kernels in sections["3.9.0"].items()
        }


def test_what_spills_is_known() -> None:
    """Under every Triton of which figures are kept."""
    for version, section in compiled_resources.known().items():
        for name, one in section["kernels"].items():
            assert one["stack"] <= SPILLED.get(name, 0), (version, name)
        for shape in compiled_resources.SHAPES:
            for name, one in section[shape].items():
                kernel, *constants = name.split()
                most = [SPILLED_IN_LAYERS[kernel, each] for each in constants if (kernel, each) in SPILLED_IN_LAYERS]
                assert one["stack"] <= max(most, default=0), (version, shape, name)
                # Operands of products are copied ahead.
                assert (one["copies"] > 0) == (kernel in ("attend", "multiply")), (version, shape, name)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return printed("tests.kernels.compiled_launches", tmp_path_factory.mktemp("launches"))


@pytest.mark.exhaustive
def test_sums_have_one_order_at_any_number_of_rows(launches: list[dict[str, Any]]) -> None:
    """Of a norm, in the kernels with leaves, with a residual and with neither: lanes are spread over threads in one way."""
    for capability in ROOM:
        own = [one for one in launches if (one["capability"], one["kind"]) == (capability, "qwen3")]
        norms = [one for one in own if one["kernel"] == "add_and_normalise"]
        assert {one["constants"]["PARTS"] for one in norms if one["constants"]["RESIDUAL"]} == {0, 2, 4, 8}
        heads = [one for one in own if one["kernel"] == "rotate_write"]
        assert norms and heads and all(one["constants"]["NORMED"] for one in heads)
        assert [len(one["sums"]) for one in (*norms, *heads)] == [1] * (len(norms) + len(heads))
        assert len({one["sums"][0] for one in (*norms, *heads)}) == 1


@pytest.mark.exhaustive
def test_sums_over_keys_stay_in_one_warp(launches: list[dict[str, Any]]) -> None:
    """In one place of a kernel for chains and trees alike: that of what a state holds for a key, and that of what is read."""
    for capability in ROOM:
        own = [one for one in launches if (one["capability"], one["kind"]) == (capability, "states")]
        steps = [one for one in own if one["kernel"] == "step_keyed"]
        assert {one["constants"]["PARTED"]: len(one["sums"]) for one in steps} == {True: 2, False: 1}
        assert sum(one["kernel"] == "divide_by_lengths" for one in own) == 1
        assert all("warpsPerCTA = [1, 1]" in layout for one in steps for layout in one["sums"])


@pytest.mark.exhaustive
def test_what_is_compiled_depends_on_the_constants_alone(launches: list[dict[str, Any]]) -> None:
    """Numbers of rows, and where they put things, are no reason to compile a kernel in mid-traffic."""
    assert {one["kernel"] for one in launches} >= {"multiply", "add_and_normalise", "rotate_write", "attend", "merge"}
    for one in launches:
        assert len(one["specialised"]) == 1, one
