"""Linear layers whose weights have eight bits, with a scale for each output; rows, sums and results are as ``RowLinear``'s.

Only the weights are rounded, so nothing of a row depends on others, and a rank's columns have the bits that they have in one
layer. A pass reads half the bytes of bfloat16.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional
from typing_extensions import override

from services.verifier.kernels.triton.row_products import TERMS, HeldWeights, RowLinear

ByteType = Literal["int8", "fp8"]
# Places between a byte and a bfloat16 number, and what the kernel makes of the byte of a one; see ``device.weight_bytes``.
_SHIFT: dict[ByteType, int] = {"int8": 0, "fp8": 4}
_ONE: dict[ByteType, float] = {"int8": 2.0**-13, "fp8": 1.0}
# The largest numbers of int8, which has no -128 here, and of e4m3.
_LARGEST: dict[ByteType, float] = {"int8": 127.0, "fp8": 448.0}
# Outputs that are rounded at a time, so that few are in memory in float32.
_AT_ONCE = 4096


class ByteLinear(RowLinear):
    """Replaces ``nn.Linear`` for inference.

    Args:
        weight: [outputs, inputs], of any type.
        form: of the bytes.
    """

    # Buffers, since parameters may be converted to other types. Bytes in pairs, and a scale for each output.
    pairs: torch.Tensor
    scales: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, form: ByteType) -> None:
        self._form: ByteType = form
        super().__init__(weight, bias)

    @override
    def _hold(self, weight: torch.Tensor) -> None:
        made = [_rounded(some, self._form) for some in torch.split(weight.detach(), _AT_ONCE)]
        self.register_buffer("pairs", torch.cat([pairs for pairs, _ in made]))
        self.register_buffer("scales", torch.cat([scales for _, scales in made]))

    @override
    def weights(self) -> HeldWeights:
        return HeldWeights(self.pairs, self.scales, _SHIFT[self._form])


def _rounded(weight: torch.Tensor, form: ByteType) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes in pairs, [outputs, padded inputs / 2], int16, and scales, [outputs], of [outputs, inputs]."""
    numbers, largest = weight.float(), _LARGEST[form]
    scales = numbers.abs().amax(1) / largest
    scales = torch.where(scales == 0, 1.0, scales)
    numbers = (numbers / scales[:, None]).clamp(-largest, largest)
    if form == "fp8":
        made = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        whole = numbers.round()
        made = whole.abs().to(torch.uint8) | torch.where(whole < 0, 0x80, 0).to(torch.uint8)
    made = functional.pad(made, (0, -made.shape[1] % TERMS))
    halves = made.view(len(made), -1, 2, TERMS // 2)
    return halves.transpose(2, 3).contiguous().view(torch.int16).flatten(1), scales / _ONE[form]
