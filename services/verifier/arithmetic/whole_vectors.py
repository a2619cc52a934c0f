"""Sigmoid, SiLU and their like on a CPU, so that a row's result does not depend on the rows beside it.

torch computes them a few vectors at a time. What is left over, at the end of a tensor and of each thread's part of it, it
computes number by number, by another exponential function, whose last bit may differ. Which numbers those are depends on how
many rows there are. Here nothing is left over. Models call these functions anywhere in their own code, so it is torch's own
functions for CPUs that are replaced, each by itself over more numbers.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

# What torch computes at a time: two vectors, at most 32 numbers each.
_AT_A_TIME = 64
# What one thread computes by itself: more numbers are shared, in parts of so many or more.
_ALONE = 2**15
# gelu: as many parts as there are threads.
_ALONE_IN_GELU = 2**14

_FUNCTIONS = ("sigmoid", "silu", "gelu", "softplus", "mish", "elu", "pow.Tensor_Scalar")
# Nothing but products, and a root that is rounded as it should be.
_EXACT_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)


@functools.cache
def fill_vectors() -> torch.library.Library:
    """From now on, torch's activations on CPUs are computed in whole vectors, in this process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # That a function is replaced is what is wanted.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name in _FUNCTIONS:
            library.impl(name, functools.partial(_filled, name), "CPU")  # type: ignore[no-untyped-call]
    # They last as long as it does.
    return library


def _filled(name: str, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The function ``name`` of ``given``, of any shape; other arguments are numbers or names."""
    function, _, overload = name.partition(".")
    into = getattr(getattr(torch.ops.aten, function), f"{overload}_out" if overload else "out")
    if function == "pow" and (not given.is_floating_point() or args[0] in _EXACT_POWERS):
        powers = torch.empty(0, dtype=torch.result_type(given, args[0]))
        return into(given, *args, **kwargs, out=powers)  # type: ignore[no-any-return]
    if not given.is_floating_point():
        given = given.to(torch.get_default_dtype())
    count = given.numel()
    room = _room(count, function == "gelu")
    if count == room:
        filled = given.contiguous()
    else:
        filled = given.new_zeros(room)
        filled[:count].view(given.shape).copy_(given)
    made: torch.Tensor = into(filled, *args, **kwargs, out=torch.empty_like(filled))
    return made if count == room else made[:count].view(given.shape)


def _room(count: int, of_gelu: bool) -> int:
    """The next size from ``count`` on of which every thread gets whole vectors."""
    threads, room = torch.get_num_threads(), count
    while True:
        parts = (threads if room > _ALONE_IN_GELU else 1) if of_gelu else min(threads, -(-room // _ALONE))
        unit = _AT_A_TIME * max(1, parts)
        if room % unit == 0:
            return room
        room += -room % unit
