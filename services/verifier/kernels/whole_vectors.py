"""Sigmoid, SiLU and similar functions on a CPU, with results that do not depend on the other rows.

torch computes these functions a few vectors at a time. The remainder at the end of a tensor, and of each thread's part, is
computed number by number with another exponential function, whose last bit may differ. Which numbers are in the remainder
depends on the number of rows. Here the tensor is padded so that there is no remainder. Models call these functions anywhere
in their code, so torch's own CPU functions are replaced.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

# torch computes two vectors at a time, of at most 32 numbers each.
_AT_A_TIME = 64
# Up to this many numbers are computed by one thread (torch's grain size); more are split among threads.
_ALONE = 2**15
# gelu splits more numbers than this into as many parts as there are threads.
_ALONE_IN_GELU = 2**14

_FUNCTIONS = ("sigmoid", "silu", "gelu", "softplus", "mish", "elu", "pow.Tensor_Scalar")
# These powers need only products, divisions and a correctly rounded root.
_EXACT_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)


@functools.cache
def fill_vectors() -> torch.library.Library:
    """Replace torch's activation functions on CPUs in this process. Lasts as long as the returned library."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # The replacement is intended.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name in _FUNCTIONS:
            library.impl(name, functools.partial(filled, name), "CPU")  # type: ignore[no-untyped-call]
    # The replacements last as long as this object.
    return library


def filled(name: str, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The function ``name`` of ``given``, which has any shape; the other arguments are numbers or names."""
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
    """The smallest size of at least ``count`` with which every thread gets whole vectors."""
    threads, room = torch.get_num_threads(), count
    while True:
        parts = (threads if room > _ALONE_IN_GELU else 1) if of_gelu else min(threads, -(-room // _ALONE))
        unit = _AT_A_TIME * max(1, parts)
        if room % unit == 0:
            return room
        room += -room % unit
