"""Rounding of what enters a product by our kernel: the bits of ``InputRounding``, which are those of compressed-tensors."""

from __future__ import annotations

import ctypes

import pytest
import torch

from services.model_files.weights.rounded_inputs import InputRounding
from services.model_files.weights.stored_blocks import TABLES
from services.verifier.kernels.native.library import instruction_sets, library
from services.verifier.kernels.native.rounding_struct import rounding_struct

KINDS = {
    "whole": InputRounding(), "floats": InputRounding(floats=True), "whole, parts": InputRounding(size=32),
    "floats, parts": InputRounding(floats=True, size=16), "whole, stored": InputRounding(stored=True, scale=0.03),
    "floats, stored": InputRounding(floats=True, stored=True, scale=1.0), "zeros": InputRounding(symmetric=False),
    "zeros, parts": InputRounding(symmetric=False, size=32), "floats, zeros": InputRounding(floats=True, symmetric=False),
    "zeros, stored": InputRounding(symmetric=False, stored=True, scale=1.0, zero=-9.0),
    "four bits": InputRounding(floats=True, bits=4, size=16, global_scale=448.0),
    "four bits, powers": InputRounding(floats=True, bits=4, size=32, powers=True),
    "floats, powers": InputRounding(floats=True, size=32, powers=True),
    "four bits, fine scales": InputRounding(floats=True, bits=4, size=16, global_scale=0.3),
}  # fmt: skip


def rounded(instructions: str, kind: str, rows: torch.Tensor) -> torch.Tensor:
    kernels = library(instructions)
    if kernels is None:
        pytest.skip(f"no {instructions} here")
    made, function = torch.empty_like(rows), kernels.functions.outrider_round_rows
    function.restype = None
    how, sizes = rounding_struct(KINDS[kind]), [ctypes.c_int64(size) for size in rows.shape]
    function(ctypes.byref(how), *sizes, ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(made.data_ptr()))
    return made


def between_codes() -> torch.Tensor:
    """All numbers that have a code, what lies halfway between neighbours, and the numbers next to these."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.cat([codes[codes.isfinite()], torch.arange(-128.0, 128)]).sort().values
    four = torch.tensor(TABLES["E2M1"]).sort().values
    made = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, (four[1:] + four[:-1]) / 2])
    far = torch.tensor(1000.0)
    return torch.cat([made, torch.nextafter(made, far), torch.nextafter(made, -far)]).clamp(-448, 448)


def reach_of(rounding: InputRounding) -> float:
    """The largest number whose scale is 1; of powers of two, one of those."""
    if rounding.powers:
        return 1.5 * 2**rounding.greatest_power
    return 127.5 if not rounding.floats else rounding.codes[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("instructions", instruction_sets())
def test_the_kernel_rounds_to_the_same_bits(instructions: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(96, generator=generator) * 10.0**power for power in range(-38, 30, 4)]
    rows += [torch.zeros(96), torch.full((96,), -3.0), torch.full((96,), 1e-42), torch.full((96,), -1e-44)]
    rows += [torch.linspace(-1, 7, 96), torch.linspace(-7, 1e-3, 96), torch.linspace(2, 9, 96)]
    # With a scale of 1, or of what makes one.
    reach = reach_of(KINDS[kind])
    parts = between_codes().clamp(-reach, reach).split(15)
    ends = [torch.cat([part, torch.full((16 - len(part),), reach)]) for part in parts]
    ends += [ends[0]] * (-len(ends) % 6)
    given = torch.stack(rows + list(torch.cat(ends).view(-1, 96)))
    assert torch.equal(rounded(instructions, kind, given), KINDS[kind](given))


def test_parts_that_are_no_whole_vectors_are_left_to_modules() -> None:
    with pytest.raises(ValueError, match="our kernels do not have"):
        rounding_struct(InputRounding(size=24))


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_stays_none(kind: str) -> None:
    given = torch.ones(1, 32)
    given[0, 3] = float("nan")
    assert rounded(instruction_sets()[0], kind, given).isnan().sum() == 1
