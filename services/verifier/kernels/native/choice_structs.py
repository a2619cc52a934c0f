"""A request as the native kernel reads it; mirrors choose.h."""

from __future__ import annotations

import ctypes

from services.verifier.choosing.penalties import Penalties
from speculation.types import SamplingParams

_OF_REQUEST = ("biases", "bars", "barred_until", "sampled")
_FACTORS = ("temperature", "presence", "frequency", "repetition", "outside", "min_p")


class RequestStruct(ctypes.Structure):
    """The struct in choose.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("biased", "barred", "bias")],
        *[(name, ctypes.c_int64) for name in _OF_REQUEST],
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        *[(name, ctypes.c_float) for name in _FACTORS],
    ]


def request_struct(params: SamplingParams, penalties: Penalties) -> RequestStruct:
    """What the kernel reads of a request; points into ``penalties``, which must live as long."""
    return RequestStruct(
        biased=penalties.biased.ctypes.data,
        barred=penalties.barred.ctypes.data,
        bias=penalties.bias.ctypes.data,
        biases=len(penalties.biased),
        bars=len(penalties.barred),
        barred_until=penalties.barred_until,
        sampled=params.temperature > 0,
        seed=params.seed,
        # Counts beyond any vocabulary exclude nothing.
        top_k=min(params.top_k, 2**62),
        temperature=params.temperature,
        presence=penalties.presence,
        frequency=penalties.frequency,
        repetition=penalties.repetition,
        outside=1 - params.top_p,
        min_p=params.min_p,
    )
