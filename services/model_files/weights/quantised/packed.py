"""One weight of the float model, and the stored tensors that stand for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.model_files.weights.described import Tensor
from services.model_files.weights.rounded_inputs import InputRounding
from services.model_files.weights.stacked_blocks import AnyWeight

# Stored tensors by their part in a weight, such as ``codes`` and ``scales``.
Stored = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A weight that is not stored as numbers.

    Attributes:
        name: the weight's name in the float model.
        shape: its shape there.
        parts: the names of the stored tensors; the part ``codes`` holds a code for each number.
        expand: makes the weight of the stored tensors: its numbers in float32 or bfloat16, or blocks that hold them.
        dtype: safetensors' or GGUF's name of the type that holds the numbers exactly, as far as headers tell.
        entering: how its layer rounds what enters it, but for stored scales, which are parts; None: it does not.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    expand: Callable[[Stored], AnyWeight]
    dtype: str = "F32"
    entering: InputRounding | None = None

    def weight(self, get: Callable[[str], torch.Tensor]) -> AnyWeight:
        """The weight, from the stored tensors that ``get`` gives by name.

        Raises:
            ValueError: a scale is infinite or NaN, or the tensors contradict each other; names the tensor.
        """
        stored = {part: get(name) for part, name in self.parts.items()}
        for part, tensor in stored.items():
            if part != "codes" and tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                raise ValueError(f"{self.parts[part]} holds infinite values or NaN; fetch the files again")
        return self.expand(stored)

    def rounding(self, get: Callable[[str], torch.Tensor]) -> InputRounding | None:
        """How its layer rounds what enters it; None: it does not.

        Args:
            get: gives stored tensors by name.

        Raises:
            ValueError: the stored scale is none.
        """
        entering = self.entering
        if entering is not None and entering.global_scale is not None:
            return replace(entering, global_scale=self._positive("input_global_scale", get))
        if entering is None or not entering.stored:
            return entering
        zero = 0.0 if entering.symmetric else float(get(self.parts["input_zero"]))
        return replace(entering, scale=self._positive("input_scale", get), zero=zero)

    def _positive(self, part: str, get: Callable[[str], torch.Tensor]) -> float:
        number = float(get(self.parts[part]))
        if not 0 < number < float("inf"):
            raise ValueError(f"{self.parts[part]} is {number:g}: must be a positive number")
        return number


class Format(Protocol):
    """How a checkpoint stores its weights."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def entering(self) -> str:
        """How layers round what enters them; empty: none does."""
        ...

    def find(self, tensors: Mapping[str, Tensor]) -> list[Packed]:
        """The weights that are not stored as numbers, by the headers of all tensors.

        Raises:
            ValueError: a tensor is missing or has another shape than its weight needs; names it.
        """
        ...


def parts_of(
    tensors: Mapping[str, Tensor], named: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The names of a weight's parts.

    Args:
        named: by part, the names of the tensors that it must have, ``codes`` among them.
        optional: those that it may have.

    Raises:
        ValueError: a tensor is missing.
    """
    lacking = next((name for name in named.values() if name not in tensors), None)
    if lacking is not None:
        raise ValueError(f"its files hold no {lacking}, without which {named['codes']} stands for no numbers")
    return {**named, **{part: name for part, name in (optional or {}).items() if name in tensors}}


def expect(
    tensors: Mapping[str, Tensor], name: str, dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]], why: str = ""
) -> None:
    """Check a stored tensor by its header.

    Args:
        why: what its shape follows from.

    Raises:
        ValueError: it has none of these types and shapes.
    """
    dtypes, shapes, found = tuple(dtypes), tuple(dict.fromkeys(shapes)), tensors[name]
    if found.dtype not in dtypes or found.shape not in shapes:
        allowed = f"{' or '.join(dtypes)} {' or '.join(str(list(shape)) for shape in shapes)}"
        raise ValueError(f"{name} is {found}: must be {allowed}{f', {why}' if why else ''}")


def groups_of(inputs: int, size: int, name: str) -> int:
    """The number of groups of ``size`` inputs that have a scale each.

    Raises:
        ValueError: the groups are not whole.
    """
    if inputs % size:
        raise ValueError(f"{name} has {inputs} inputs, which are no groups of {size} (group_size)")
    return inputs // size


def spread(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Scales in float32, one for each number of a weight; for each output, where that is one for all its inputs.

    Args:
        scales: [..., rows of blocks, columns of blocks].
        shape: the weight's, [..., outputs, inputs]; blocks at its ends may be cut.
        block: outputs and inputs that share a scale.
    """
    rows, columns = shape[-2:]
    wide = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return wide if wide.shape[-1] == 1 else wide.repeat_interleave(block[1], -1)[..., :columns]


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` bits as int32, [rows, codes], from rows of int32 words: a row is one string of bits.

    The lowest bits come first. Bits behind the last whole code are left out.
    """
    if bits in (4, 8):
        codes = words.contiguous().view(torch.uint8)
        if bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        return codes.int()
    count = words.shape[-1] * 32 // bits
    starts = torch.arange(count) * bits
    wide = words.long() & 0xFFFFFFFF
    following = torch.nn.functional.pad(wide, (0, 1))[..., starts // 32 + 1]
    both = wide[..., starts // 32] | (following << 32)
    return ((both >> (starts % 32)) & ((1 << bits) - 1)).int()
