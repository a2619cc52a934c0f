"""Steps the states of models whose layers compute them in methods of their own (others: ``functions``)."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as recurrent_gemma
from transformers.models.rwkv import modeling_rwkv as rwkv
from typing_extensions import override

from services.model_files.weights.stored_blocks import StoredLinear
from services.verifier.attention.calls import answerer, asked
from services.verifier.recurrence.convolution import ShortConvolution
from services.verifier.recurrence.gated_scan import GatedScan
from services.verifier.recurrence.selective_scan import Mamba2Scan


def adapt(model: nn.Module) -> None:
    """Replace the methods and modules that compute states. Must run before the linear layers are replaced."""
    for module in list(model.modules()):
        adapter = _ADAPTERS.get(type(module))
        if adapter is not None:
            adapter(module)


class _Convolved(nn.Module):
    """Replaces a convolution whose filter has one row per channel."""

    def __init__(self, own: nn.Conv1d) -> None:
        super().__init__()
        self.own = own

    @override
    def forward(self, channels: torch.Tensor) -> torch.Tensor:
        """[1, channels, rows], both ways."""
        if answerer() is None:
            made: torch.Tensor = self.own(channels)
            return made
        convolution = ShortConvolution(weight=self.own.weight[:, 0], bias=self.own.bias, activation=None)
        return asked().step(convolution, channels[0].T).T[None]


class _Shifted(nn.Module):
    """Replaces what gives each row the row before it."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[1, rows, channels], both ways."""
        if answerer() is None:
            made: torch.Tensor = self.own(rows)
            return made
        # Made where they are needed, so that a GPU is not waited for.
        taps = torch.eye(2, device=rows.device)[:1].expand(rows.shape[2], 2)
        return asked().step(ShortConvolution(weight=taps, bias=None, activation=None), rows[0])[None]


def _minimax(module: Any) -> None:
    own = module.forward

    def forward(self: Any, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, Any]:
        if answerer() is None:
            made: tuple[torch.Tensor, Any] = own(hidden_states=hidden_states, **given)
            return made
        heads, size = self.num_attention_heads, self.head_dim
        # Linear attention whose state decays by one factor is Mamba-2's scan with time steps of 1.
        scan = Mamba2Scan(
            heads=heads, head_size=size, groups=heads, state_size=size, decay=-self.slope_rate.flatten(), skip=None,
            step_bias=None, softplus=False, least_step=0.0, most_step=float("inf"),
        )  # fmt: skip
        rows = self.act_fn(self.qkv_proj(hidden_states))[0].view(-1, heads, 3 * size)
        queries, keys, values = (each.flatten(1) for each in rows.split(size, dim=2))
        times = values.new_ones(len(values), heads)
        read = self.norm(asked().step(scan, torch.cat([values, times, keys, queries], dim=1))[None])
        return self.out_proj(functional.sigmoid(self.output_gate(hidden_states)) * read), None

    module.forward = MethodType(forward, module)


def _recurrent_gemma(module: Any) -> None:
    module.conv_1d = _Convolved(module.conv_1d)
    own = module.rg_lru._rnn_scan

    def scanned(
        hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if answerer() is None:
            made: tuple[torch.Tensor, torch.Tensor] = own(hidden_states, recurrent_gate, reset, **given)
            return made
        rows = torch.cat([(recurrent_gate * ~reset)[0], hidden_states[0]], dim=1)
        return asked().step(GatedScan(width=hidden_states.shape[2]), rows)[None].to(hidden_states.dtype), None

    module.rg_lru._rnn_scan = scanned


def _rwkv(module: Any) -> None:
    module.time_shift = _Shifted(module.time_shift)


def _rwkv_model(module: Any) -> None:
    # Its first pass would divide weights in place, which may be blocks as stored, or shared with other processes. Then it
    # would halve what every few blocks give, outside of them, where nobody who observes a layer sees it.
    every = module.config.rescale_every
    for block in module.blocks if every > 0 else ():
        # Its number in the whole model, also in a pipeline stage.
        number = block.layer_id
        by = 2 ** (number // every)
        block.attention.output = _divided(block.attention.output, by)
        block.feed_forward.value = _divided(block.feed_forward.value, by)
        if (number + 1) % every == 0:
            block.register_forward_hook(_halved)
    module.layers_are_rescaled = True
    module.config = copy(module.config)
    module.config.rescale_every = 0


def _halved(block: nn.Module, given: object, made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    hidden, *others = made
    return (hidden / 2, *others)


def _divided(linear: nn.Linear | StoredLinear, by: int) -> nn.Linear | StoredLinear:
    if by == 1:
        return linear
    weight = linear.weight if isinstance(linear.weight, nn.Parameter) else linear.weight.float()
    made = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach() / by, requires_grad=False)
    return made


_ADAPTERS: dict[type[nn.Module], Callable[[Any], None]] = {
    minimax.MiniMaxLightningAttention: _minimax,
    recurrent_gemma.RecurrentGemmaRecurrentBlock: _recurrent_gemma,
    rwkv.RwkvSelfAttention: _rwkv,
    rwkv.RwkvFeedForward: _rwkv,
    rwkv.RwkvModel: _rwkv_model,
}
