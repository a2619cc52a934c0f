"""Computes the layers of transformers' models that have a state, where a pass runs.

The models of one family call functions of the same name and signature, each in its own module: they are replaced there.
Where no pass runs, transformers' own function answers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from services.verifier.attention.calls import answerer, asked
from services.verifier.recurrence.convolution import ShortConvolution

_Function = Callable[..., Any]


def install(model: nn.Module) -> None:
    """Replace the functions that the model's layers call. Lasts as long as the process."""
    for name in {type(module).__module__ for module in model.modules()}:
        own = sys.modules[name]
        for function, ours in _FUNCTIONS.items():
            theirs = getattr(own, function, None)
            if theirs is not None and not hasattr(theirs, "outrider"):
                setattr(own, function, _answering(theirs, ours))


def _answering(theirs: _Function, ours: _Function) -> _Function:
    @functools.wraps(theirs)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return (theirs if answerer() is None else ours)(*args, **kwargs)

    answer.outrider = True  # type: ignore[attr-defined]
    return answer


def _convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """[1, channels, rows], both ways; ``weight`` is [channels, taps]."""
    convolution = ShortConvolution(weight=weight, bias=bias, activation=activation)
    return asked().step(convolution, hidden_states[0].T).T[None]


def _mask(**_: object) -> None:
    """Which rows of a batch are no padding: all of them."""
    return None


_FUNCTIONS: dict[str, _Function] = {"causal_conv1d_fn": _convolution, "create_recurrent_attention_mask": _mask}
