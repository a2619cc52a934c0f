"""Linear layers that round what enters them, as checkpoints with quantised activations define it (W8A8, FP8 dynamic).

The scale follows from a row alone, or is stored. So a row's numbers do not depend on what shares its pass. The arithmetic is
that of compressed-tensors' ``fake_quantize``: code = round(x / scale), number = code * scale, in the type of the rows. On a
GPU, and where scales are rounded themselves, it is in float32, and the number is then rounded to the type of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from services.model_files.weights.stored_blocks import StoredLinear

# The least and the greatest code.
_WHOLE, _FLOATS, _FOUR_BITS = (-128.0, 127.0), (-448.0, 448.0), (-6.0, 6.0)
# The scale of a part of zeros alone, where scales are rounded; any other would do.
_OF_ZEROS = 0.125
_OF_EXPERTS = "_rounded_inputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRounding:
    """How the numbers that enter a layer are rounded to eight bits, or to four.

    Attributes:
        floats: the codes are FP8 (e4m3), or floats of four bits (e2m1); otherwise they are whole numbers.
        bits: of a code: 8, or 4.
        symmetric: there is no zero point.
        size: neighbouring inputs that share a scale; None: all of a row.
        stored: a scale for all rows is stored, and is ``scale``; and a zero point, ``zero``, unless it is symmetric.
        global_scale: what scales are multiplied by before they are rounded to FP8 themselves (NVFP4); None: they are not.
        powers: scales are powers of two (MXFP4, MXFP8).
    """

    floats: bool = False
    bits: int = 8
    symmetric: bool = True
    size: int | None = None
    stored: bool = False
    scale: float = 1.0
    zero: float = 0.0
    global_scale: float | None = None
    powers: bool = False

    @property
    def codes(self) -> tuple[float, float]:
        """The least and the greatest code."""
        if self.bits == 4:
            return _FOUR_BITS
        return _FLOATS if self.floats else _WHOLE

    @property
    def name(self) -> str:
        """What users call it."""
        kind = "floats" if self.floats else "whole numbers"
        shared = "row" if self.size is None else f"{self.size} numbers of a row"
        scale = "a power of two" if self.powers else "a scale" if self.global_scale is None else "a scale in FP8"
        return f"{kind} of {self.bits} bits with {'a stored scale' if self.stored else f'{scale} for each {shared}'}"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs], rounded; ``rows`` stays what it is."""
        if (self.powers or self.global_scale is not None) and rows.dtype != torch.float32:
            return self.in_float32(rows)
        parts = rows if self.size is None else rows.reshape(*rows.shape[:-1], -1, self.size)
        scale, zero = self._read(rows) if self.stored else self._own(parts)
        codes = parts / scale
        if zero is not None:
            codes += zero
        codes.clamp_(*self.codes)
        if self.bits == 4:
            codes = _to_four_bits(codes)
        else:
            codes = codes.to(torch.float8_e4m3fn).to(rows.dtype) if self.floats else codes.round_()
        if zero is not None:
            codes -= zero
        return codes.mul_(scale).reshape(rows.shape)

    def in_float32(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs], rounded in float32, then to the type of ``rows``: the definition on GPUs."""
        return self(rows.float()).to(rows.dtype)

    @property
    def greatest_power(self) -> int:
        """Of two, among the codes: what the greatest number of a part comes near to, where scales are powers of two."""
        return int(math.log2(self.codes[1]))

    def _read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        zero = None if self.symmetric else _number(self.zero, rows)
        return _number(self.scale, rows), zero

    def _own(self, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        low, high = self.codes
        smallest = torch.finfo(parts.dtype).eps
        if self.symmetric:
            reach = parts.abs().amax(-1, keepdim=True)
            if self.powers:
                return _powers(reach, self.greatest_power), None
            scale = reach / _number((high - low) / 2, parts)
            if self.global_scale is not None:
                return _rounded(scale, _number(self.global_scale, parts)), None
            return scale.masked_fill_(scale == 0, smallest), None
        # Zero is always among the numbers that have a code.
        least, most = parts.amin(-1, keepdim=True).clamp_(max=0), parts.amax(-1, keepdim=True).clamp_(min=0)
        scale = (most - least) / _number(high - low, parts)
        # A row of zeros has no scale, and needs no zero point.
        zero = (low - least / scale).nan_to_num_(0).clamp_(low, high).round_()
        return scale.masked_fill_(scale == 0, smallest), zero


def _rounded(scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Scales that are FP8 once they are multiplied by what is stored of the layer."""
    codes = (scales * global_scale).clamp_(max=_FLOATS[1]).to(torch.float8_e4m3fn).to(scales.dtype)
    return codes.masked_fill_(codes == 0, _OF_ZEROS) / global_scale


def _powers(reach: torch.Tensor, greatest: int) -> torch.Tensor:
    """Powers of two, by which ``reach`` becomes 2^greatest or less than twice that: more where it would be 1.75 times."""
    # Where a float has its exponent. Those below its range are the least one, a subnormal number.
    exponents = ((reach.view(torch.int32) + (1 << 21)) >> 23) - greatest
    return torch.where(exponents > 0, exponents << 23, 1 << 22).view(torch.float32)


def _to_four_bits(codes: torch.Tensor) -> torch.Tensor:
    """The nearest floats of four bits, of numbers of at most 6: one bit behind the first; below 1, multiples of a half."""
    size = codes.abs()
    step = torch.ones_like(size).masked_fill_(size < 2, 0.5).masked_fill_(size >= 4, 2)
    return (codes / step).round_().mul_(step)


def _number(one: float, like: torch.Tensor) -> torch.Tensor:
    """A tensor, since torch may multiply by a number's reciprocal where it is to divide; filled, so graphs can have it."""
    return torch.full((), one, dtype=like.dtype, device=like.device)


class RoundedInputs:
    """Rounds what enters layers that are called one after the other with the same input: once for all of them.

    Args:
        layers: how many these are.

    Attributes:
        compute: rounds rows.
        active: whether it does.
    """

    def __init__(self, rounding: InputRounding, layers: int) -> None:
        self.rounding, self.active = rounding, True
        self.compute: Callable[[torch.Tensor], torch.Tensor] = rounding
        self._layers = layers
        # The input is kept from the call of the first layer to that of the last.
        self._left = 0
        self._given: torch.Tensor | None = None
        self._made: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., inputs], rounded."""
        if not self.active:
            return rows
        made = self._made
        if made is None or self._given is not rows:
            made, self._left = self.compute(rows), self._layers
        self._left -= 1
        self._given, self._made = (rows, made) if self._left else (None, None)
        return made


class RoundedExpertInputs:
    """Rounds what enters one of the products of a module of experts: by each of them for its own rows.

    Args:
        roundings: by expert; None: it does not round.

    Attributes:
        active: whether it does.
    """

    def __init__(self, roundings: Sequence[InputRounding | None]) -> None:
        self.roundings, self.active = tuple(roundings), True
        self._one = roundings[0] if len(set(roundings)) == 1 else None

    def __call__(self, rows: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """[rows, inputs], rounded.

        Args:
            rows: sorted by expert.
            chosen, counts: the experts that have rows, and how many.
        """
        if not self.active:
            return rows
        if self._one is not None:
            return self._one(rows)
        by_expert = zip((self.roundings[one] for one in chosen.tolist()), torch.split(rows, counts.tolist()), strict=True)
        return torch.cat([part if rounding is None else rounding(part) for rounding, part in by_expert])


def round_experts(model: nn.Module, roundings: Mapping[str, Sequence[InputRounding | None]]) -> None:
    """Let experts round what enters their products.

    Args:
        roundings: by the name of the parameter that has all experts' matrices; of each expert.

    Raises:
        ValueError: the model does not compute these experts through transformers' experts interface.
    """
    for name, of_each in roundings.items():
        place, _, own = name.rpartition(".")
        module = model.get_submodule(place)
        if not hasattr(module, "_apply_gate"):
            raise ValueError(
                f"what enters {name} is to be rounded (input_activations), and {type(module).__name__} computes experts "
                "in a way of its own, not through transformers' experts interface"
            )
        # Noted at the module, since the functions that compute experts are given that.
        noted: dict[str, RoundedExpertInputs] = module.__dict__.setdefault(_OF_EXPERTS, {})
        noted[own] = RoundedExpertInputs(of_each)


def expert_inputs(module: nn.Module) -> Mapping[str, RoundedExpertInputs]:
    """How a module of experts rounds what enters its products, by the parameter's name; empty: it does not."""
    found: Mapping[str, RoundedExpertInputs] = getattr(module, _OF_EXPERTS, {})
    return found


class RoundedLinear(nn.Module):
    """A linear layer, behind the rounding of what enters it.

    Attributes:
        after_rounding: the layer, which may be replaced by a packed one.
    """

    def __init__(self, linear: nn.Linear | StoredLinear, inputs: RoundedInputs) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.after_rounding: nn.Module = linear
        self.inputs = inputs

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        made: torch.Tensor = self.after_rounding(self.inputs(rows))
        return made


def round_inputs(model: nn.Module, roundings: Mapping[str, InputRounding], siblings: Sequence[tuple[str, ...]] = ()) -> None:
    """Let layers round what enters them.

    Args:
        roundings: by the layer's name in ``model``.
        siblings: names of children of one module that are called one after the other with the same input.

    Raises:
        ValueError: one of them is no linear layer of the model.
    """
    left = dict(roundings)
    for name, rounding in roundings.items():
        if name not in left:
            continue
        parent, _, own = name.rpartition(".")
        several = next((names for names in siblings if own in names), (own,))
        together = [f"{parent}.{one}" if parent else one for one in several]
        if any(left.get(one) != rounding for one in together):
            together = [name]
        inputs = RoundedInputs(rounding, len(together))
        for one in together:
            del left[one]
            _replace(model, one, inputs)


def _replace(model: nn.Module, name: str, inputs: RoundedInputs) -> None:
    # Here alone: it brings the library of GGUF files, which a bare machine with a GPU need not have.
    from services.model_files.weights.stored_blocks import StoredLinear

    parent_name, _, own = name.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        linear = parent.get_submodule(own)
    except AttributeError:
        linear = parent = model
    if type(linear) not in (nn.Linear, StoredLinear):
        raise ValueError(
            f"what enters {name} is to be rounded (input_activations), and {type(model).__name__} has no linear layer of "
            "this name: layers that are joined or renamed when they are loaded cannot do that"
        )
    assert isinstance(linear, nn.Linear | StoredLinear)
    setattr(parent, own, RoundedLinear(linear, inputs))


def roundings_of(model: nn.Module) -> dict[str, InputRounding | tuple[InputRounding | None, ...]]:
    """Of the layers of a model that round what enters them, by name; of experts, by their parameter's, each one's."""
    found: dict[str, InputRounding | tuple[InputRounding | None, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, RoundedLinear):
            found[name] = module.inputs.rounding
        found |= {f"{name}.{own}": inputs.roundings for own, inputs in expert_inputs(module).items()}
    return found


def round_by(model: nn.Module, compute: Callable[[InputRounding, torch.Tensor], torch.Tensor]) -> None:
    """Let ``compute`` round what enters the layers of a model: it is given the rounding and rows."""
    for module in model.modules():
        if isinstance(module, RoundedLinear):
            module.inputs.compute = partial(compute, module.inputs.rounding)


@contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Let no layer round what enters it: a last bit may move a number to the next code, a whole step away."""
    found: list[RoundedInputs | RoundedExpertInputs] = []
    for module in model.modules():
        found += [module.inputs] if isinstance(module, RoundedLinear) else expert_inputs(module).values()
    for inputs in found:
        inputs.active = False
    try:
        yield
    finally:
        for inputs in found:
            inputs.active = True
