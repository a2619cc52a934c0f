"""Computes the layers of transformers' models that have a state, where a pass runs.

The models of one family call functions of the same name and signature, each in its own module: they are replaced there.
Where no pass runs, transformers' own function answers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from services.model_files.weights.stored_blocks import StoredLinear
from services.verifier.attention.calls import answerer, asked
from services.verifier.kernels.multiplied_weight import MultipliedWeight
from services.verifier.recurrence import modules
from services.verifier.recurrence.convolution import ShortConvolution
from services.verifier.recurrence.delta_rule import DeltaRule
from services.verifier.recurrence.selective_scan import Mamba2Scan, MambaScan
from services.verifier.recurrence.weighted_mean import WeightedMean

_Function = Callable[..., Any]


def install(model: nn.Module) -> None:
    """Replace the functions that the model's layers call. Lasts as long as the process.

    Must run before the linear layers are replaced.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        own = sys.modules[name]
        for function, ours in _FUNCTIONS.items():
            theirs = getattr(own, function, None)
            if theirs is not None and not hasattr(theirs, "outrider"):
                setattr(own, function, _answering(theirs, ours))
        if hasattr(own, "mamba_selective_scan"):
            _use_by_weight([module for module in model.modules() if type(module).__module__ == name])
    modules.adapt(model)


def _use_by_weight(mixers: Iterable[nn.Module]) -> None:
    for mixer in mixers:
        layer = dict(mixer.named_children()).get("dt_proj")
        if isinstance(layer, (nn.Linear, StoredLinear)):
            mixer.dt_proj = MultipliedWeight(layer)


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


def _mamba2_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: object,
) -> torch.Tensor:
    """``hidden_states`` is [1, rows, heads, head size], ``B`` and ``C`` are [1, rows, groups, state size]; as the former."""
    rows, heads, head_size = hidden_states.shape[1:]
    groups, state_size = B.shape[2:]
    scan = Mamba2Scan(
        heads=heads, head_size=head_size, groups=groups, state_size=state_size, decay=A, skip=D, step_bias=dt_bias,
        softplus=dt_softplus, least_step=dt_limit[0], most_step=dt_limit[1],
    )  # fmt: skip
    given = torch.cat([each[0].flatten(1) for each in (hidden_states, dt, B, C)], dim=1)
    return asked().step(scan, given).view(1, rows, heads, head_size)


def _mamba_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: object,
) -> torch.Tensor:
    """``hidden_states``, ``dt`` and ``z`` are [1, channels, rows], ``B`` and ``C`` [1, state size, rows]; as the former."""
    scan = MambaScan(decay=A, skip=D, step_bias=delta_bias, softplus=delta_softplus)
    made = asked().step(scan, torch.cat([each[0] for each in (hidden_states, dt, B, C)]).T).T[None]
    return made if z is None else made * functional.silu(z)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """``query`` and ``key`` are [1, rows, key heads, key size], ``value`` is [1, rows, heads, value size], as the result;
    ``g`` is [1, rows, heads] or [1, rows, heads, key size], ``beta`` [1, rows, heads].
    """
    rule = DeltaRule(
        heads=value.shape[2], key_heads=key.shape[2], key_size=key.shape[3], value_size=value.shape[3],
        decays=g[0, 0, 0].numel(), normalised=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    made = asked().step(rule, torch.cat([each[0].flatten(1) for each in (query, key, value, g, beta)], dim=1))
    return made.view(value.shape).to(query.dtype), None


def _weighted_mean(
    time_decay: torch.Tensor, time_first: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object
) -> tuple[torch.Tensor, None]:
    """``key`` and ``value`` are [1, rows, channels], as the result; the others are [channels]."""
    mean = WeightedMean(decay=-time_decay.float().exp(), first=time_first)
    return asked().step(mean, torch.cat([key[0], value[0]], dim=1))[None], None


def _mask(**_: object) -> None:
    """Which rows of a batch are no padding: all of them."""
    return None


_FUNCTIONS: dict[str, _Function] = {
    "causal_conv1d_fn": _convolution,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "rwkv_linear_attention": _weighted_mean,
    "create_recurrent_attention_mask": _mask,
}
