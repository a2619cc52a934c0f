"""Models without memory for their weights: built, and run through by shapes alone.

Other threads are not affected, and may load models meanwhile. For most operations on the meta device torch runs Python that
works out shapes, types and strides of any input: half a millisecond for a product of two tensors, and a layer has dozens of
operations. So the commonest are answered here, with the same shape, type and strides; all others are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

_M = TypeVar("_M", bound=nn.Module)
_ATEN = torch.ops.aten
# Of floats, whatever they are, as many of the same type.
_ONE_BY_ONE = (
    *(_ATEN.neg.default, _ATEN.rsqrt.default, _ATEN.sqrt.default, _ATEN.exp.default, _ATEN.pow.Tensor_Scalar),
    *(_ATEN.silu.default, _ATEN.gelu.default, _ATEN.relu.default, _ATEN.sigmoid.default, _ATEN.tanh.default),
)
_PAIRED = (_ATEN.mul.Tensor, _ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.div.Tensor)


class _EmptyTakesNoMemory(TorchFunctionMode):
    """``torch.empty`` gives tensors on the meta device. Like all such modes, it is in force in its own thread only."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def without_weights(make: Callable[[], _M]) -> _M:
    """What ``make`` makes, its weights on the meta device and its buffers computed.

    Where buffers are not, the model is made with memory for all.
    """
    made = weights_on_meta(make)
    return make() if any(buffer.is_meta for buffer in made.buffers()) else made


def weights_on_meta(make: Callable[[], _M]) -> _M:
    """What ``make`` makes, its weights on the meta device, its buffers computed, but for some of a few architectures.

    A model makes room for weights by ``torch.empty``, while buffers, which files do not store, are computed from the start.
    (accelerate's ``init_empty_weights`` does the same for all threads at once: it would empty what others load meanwhile.)
    """
    with _EmptyTakesNoMemory():
        return make()


class ByShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """While it is in force, in its own thread, operations on the meta device are answered by shapes where that is enough."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self.answer(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if made is None else made

    @staticmethod
    def answer(func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """What an operation makes; None: torch has to be asked."""
        answer = _ANSWERS.get(func)
        return None if answer is None else answer(*args, **kwargs)


def _one_by_one(given: Tensor, *_: Any, **others: Any) -> Tensor | None:
    return _like(given, given.dtype) if given.is_meta and given.is_floating_point() else None


def _paired(one: Any, other: Any, *, alpha: Any = 1) -> Tensor | None:
    """Of two tensors, one of which alone says what shape the result has and how its numbers lie; or of one and a number."""
    tensors = isinstance(other, Tensor)
    # A number may come first: 1 + x.
    if not isinstance(one, Tensor) or not one.is_meta or (tensors and not other.is_meta):
        return None
    large = one
    if tensors and not _within(other, one):
        # The first one decides how numbers lie, unless it repeats along all axes but one.
        if not _within(one, other) or sum(size > 1 for size in one.shape) > 1:
            return None
        large = other
    kind = torch.result_type(one, other)
    return _like(large, kind) if kind.is_floating_point else None


def _within(small: Tensor, large: Tensor) -> bool:
    """Whether both together have the shape of ``large``."""
    before = large.dim() - small.dim()
    return before >= 0 and all(size in (1, wide) for size, wide in zip(small.shape, large.shape[before:], strict=True))


def _mean(given: Tensor, axes: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    if not (given.is_meta and given.is_floating_point() and given.is_contiguous() and axes and dtype is None):
        return None
    if not all(-given.dim() <= axis < given.dim() for axis in axes):
        return None
    gone = {axis % given.dim() for axis in axes}
    shape = [1 if axis in gone else size for axis, size in enumerate(given.shape) if keepdim or axis not in gone]
    return torch.empty(shape, dtype=given.dtype, device="meta")


def _cat(given: Sequence[Tensor], axis: int = 0) -> Tensor | None:
    first, *others = given
    # What lies as images do is joined so, too. Of tensors with one axis the empty ones count for nothing.
    if (
        first.dim() < 2
        or not -first.dim() <= axis < first.dim()
        or any(not each.is_meta or _as_images(each) for each in given)
    ):
        return None
    shape = list(first.shape)
    for each in others:
        if each.dtype != first.dtype or each.dim() != first.dim():
            return None
        shape[axis] += each.shape[axis]
    if any(shape[:axis] != list(each.shape[:axis]) or shape[axis:][1:] != list(each.shape[axis:][1:]) for each in others):
        return None
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _as_images(given: Tensor) -> bool:
    """Whether channels, the second axis, may lie closest together."""
    return given.dim() in (4, 5) and given.stride(1) <= given.stride(-1)


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not (given.is_meta and weight.is_meta and given.dtype == weight.dtype and given.dim() > 1 and weight.dim() == 2):
        return None
    if given.shape[-1] != weight.shape[1] or (
        bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype)
    ):
        return None
    return torch.empty((*given.shape[:-1], weight.shape[0]), dtype=given.dtype, device="meta")


def _like(given: Tensor, dtype: torch.dtype) -> Tensor | None:
    """As many numbers, in the same order; None: that is not clear."""
    strides = _dense(tuple(given.shape), given.stride())
    return None if strides is None else torch.empty_strided(given.shape, strides, dtype=dtype, device="meta")


@cache
def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides without gaps in the same order; None: two axes have the same one, or one repeats.

    >>> _dense((2, 3, 4), (100, 1, 10))
    (12, 1, 3)
    """
    wide = sorted((stride, axis) for axis, stride in enumerate(strides) if shape[axis] > 1)
    if math.prod(shape) == 0 or any(stride == 0 for stride, _ in wide) or len({stride for stride, _ in wide}) < len(wide):
        return None
    found, step = [0] * len(shape), 1
    for _, axis in wide:
        found[axis], step = step, step * shape[axis]
    # Axes of one number lie anywhere: here as in a tensor whose axes are in order.
    after = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            found[axis] = after
        after = max(after, found[axis] * shape[axis])
    return tuple(found)


_ANSWERS: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys(_ONE_BY_ONE, _one_by_one),
    **dict.fromkeys(_PAIRED, _paired),
    _ATEN.mean.dim: _mean,
    _ATEN.cat.default: _cat,
    _ATEN.linear.default: _linear,
}
