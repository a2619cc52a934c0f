"""Triton's interpreter without the work that it does again and again: the same numbers and the same refusals in a third of the time.

It takes a tenth of a millisecond for each operation of a kernel, and a hundred times the operation's own. Most of that is made of
the same few objects each time: types of blocks, their shapes, what two types are promoted to. And it puts its own functions into the
language anew whenever a kernel calls another function. Here they are put there once, and objects that nobody changes are kept.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.running.room_for_calls import with_room

# Two numbers of such a type are computed with as they are.
_KEPT_TYPES = {"fp32", "fp64", "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}


def quicken() -> None:
    """For the rest of this process, if it interprets its kernels."""
    if not triton.knobs.runtime.interpret:
        return
    interpreter._patch_attr = _put
    # Where a function finds the language: those of kernels, and those of the language itself.
    interpreter._patch_lang(types.FunctionType(quicken.__code__, {"tl": tl, "core": core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    interpreter.GridExecutor.__call__ = with_room(interpreter.GridExecutor.__call__)
    interpreter._get_np_dtype = _remembered_by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _quick_unwrap(core._unwrap_if_constexpr)
    core.block_type.__init__ = _quick_block_type(core.block_type.__init__)
    core.tensor.__init__ = _tensor
    TritonSemantic.computation_type_impl = _quick_promotion(TritonSemantic.computation_type_impl)
    core.dtype.__eq__ = _quick_equality(core.dtype.__eq__)
    TritonSemantic.broadcast_impl_value = _quick_broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = _quick_check(TritonSemantic.binary_op_type_checking_impl)
    # What these checks compute of each integer is asserted in debug mode alone, which the interpreter has not.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


def _put(place: Any, name: str, member: Any, builder: object, scope: Any) -> None:
    """Put the interpreter's form of a function into the language."""
    function = getattr(member, "__wrapped__", member)

    def called(*args: Any, **given: Any) -> Any:
        given["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **given)

    scope.set_attr(place, name, called)


def _remembered_by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = function(dtype)
        return found

    return remembered


def _quick_unwrap(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {int, bool, float, str, core.tensor, core.dtype}

    def unwrap(given: Any) -> Any:
        return given if type(given) in plain else function(given)

    return unwrap


def _quick_block_type(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = (element_ty.name, *[size.value if type(size) is core.constexpr else size for size in sizes])
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            self.of_tensor = _of_tensor(key[1:])
            found = known[key] = dict(self.__dict__)
        self.__dict__.update(found)

    return init


@cache
def _of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The shape of a tensor, and how many numbers it has."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


_OF_SCALAR = _of_tensor(())


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _OF_SCALAR


def _quick_promotion(promote: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def promoted(self: Any, left: Any, left_scalar: bool, right: Any, right_scalar: bool, div_or_mod: bool) -> Any:
        key = (left.name, left_scalar, right.name, right_scalar, div_or_mod)
        found = known.get(key)
        if found is None:
            found = known[key] = promote(self, left, left_scalar, right, right_scalar, div_or_mod)
        return found

    return promoted


def _quick_check(check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(self: Any, left: Any, right: Any, *how: Any, **named: Any) -> Any:
        if type(left) is type(right) is core.tensor and left.type.name == right.type.name and left.dtype.name in _KEPT_TYPES:
            return left, right
        return check(self, left, right, *how, **named)

    return checked


def _quick_broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def same_shape(self: Any, left: Any, right: Any) -> Any:
        # There is one object for each shape.
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    return same_shape


def _quick_equality(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)
