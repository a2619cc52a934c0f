"""Whole decoder layers of the Llama kind by eight to ten kernels, with the bits of their modules; see ``whole_layers``.

The kernels in order: a norm with the residual before it; queries, keys and values; rotary embedding with the cache's write;
attention; the merge of segments, behind 512 positions; the output product; a norm with its residual; gate and up; down.
Parts of products are added by the kernel that reads them. Where heads have norms, a kernel before these adds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from services.verifier.attention.calls import Calls, Running, asked
from services.verifier.kernels.shared_products import shared_product
from services.verifier.kernels.triton.row_layers import RowFeedForward, RowNorm
from services.verifier.kernels.triton.row_products import HeadNorms, Product, product_of
from services.verifier.kernels.triton.tree_pass import TritonPass
from services.verifier.kernels.whole_layers import TrialPass, fuse, only_call, part_of

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class RowDecoderLayer:
    """A layer's ``forward``. Passes that are not laid out for our kernels, or have stream rows, run the layer's own.

    Args:
        after: the norm that reads what the layer makes; None: it is not known, or not ours.

    Raises:
        ValueError: the layer is of another kind; says what differs.
    """

    def __init__(self, layer: nn.Module, calls: Calls, after: RowNorm | None) -> None:
        attention = part_of(layer, "self_attn")
        self._layer, self._after = layer, after
        self._call = only_call(layer, calls)
        self._before, self._between = _norm(layer, "input_layernorm"), _norm(layer, "post_attention_layernorm")
        self._projection, self._out = _projection(attention), part_of(attention, "o_proj")
        self._feed_forward = part_of(layer, "mlp")
        self._head_norms = _head_norms(attention, self._call.key_size)
        call = self._call
        columns = call.heads * call.key_size + call.kv_heads * (call.key_size + call.value_size)
        if self._projection.out_features != columns:
            raise ValueError(f"queries, keys and values have {self._projection.out_features} numbers, not {columns}")

    def __call__(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **named: Any
    ) -> torch.Tensor:
        """Hidden states, [1, rows, hidden size], to the same shape."""
        running = asked()
        laid_out = running.laid_out if isinstance(running, Running) else None
        if not isinstance(laid_out, TritonPass):
            whole: torch.Tensor = type(self._layer).forward(
                self._layer, hidden_states, position_embeddings=position_embeddings, **named
            )
            return whole
        product = product_of(self._projection, self._before(hidden_states))
        query = laid_out.rotated(self._call, product, position_embeddings, self._head_norms)
        attended = laid_out.attended(self._call, query)
        out = product_of(self._out, attended.view(1, len(attended), -1))
        between = self._between.ahead_of(out, hidden_states)
        normed = self._between(between)
        if isinstance(self._feed_forward, RowFeedForward):
            last = self._feed_forward.product(normed)
        else:
            made = self._feed_forward(normed)
            # Mixtures of some types also give the scores of their experts.
            last = Product((made[0] if isinstance(made, tuple) else made).view(-1, normed.shape[-1]))
        if self._after is not None:
            return self._after.ahead_of(last, between)
        return between + last.added(between.dtype)


@torch.inference_mode()
def fuse_layers(decoder: nn.Module, trial_pass: TrialPass, calls: Calls) -> tuple[int, str]:
    """Let our kernels compute all layers of a decoder that they can; returns as ``whole_layers.fuse``.

    Their bits must be those of the layers, so that passes of both kinds may take turns.
    """
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    norms = [getattr(layer, "input_layernorm", None) for layer in layers[1:]] + [getattr(decoder, "norm", None)]
    after = dict(zip(layers, norms, strict=True))

    def make(layer: nn.Module) -> RowDecoderLayer:
        norm = after[layer]
        return RowDecoderLayer(layer, calls, norm if isinstance(norm, RowNorm) else None)

    return fuse(layers, make, trial_pass, tolerance=0.0)


def _norm(module: nn.Module, name: str) -> RowNorm:
    part = part_of(module, name)
    if not isinstance(part, RowNorm):
        raise ValueError(f"{name} is no root mean square norm")
    return part


def _projection(attention: nn.Module) -> nn.Module:
    """The product that makes queries, keys and values."""
    if isinstance(joint := getattr(attention, "qkv_proj", None), nn.Module):
        return joint
    product = shared_product([part_of(attention, name) for name in _PROJECTIONS])
    if product is None:
        raise ValueError("queries, keys and values are no one product")
    return product


def _head_norms(attention: nn.Module, size: int) -> HeadNorms | None:
    given = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    if not given:
        return None
    norms = [_norm(attention, name) for name in ("q_norm", "k_norm")]
    query, key = norms
    if any(len(norm.weight) != size for norm in norms) or (query.eps, query.rounded) != (key.eps, key.rounded):
        raise ValueError(f"q_norm and k_norm are not alike, or not over one head ({size})")
    return HeadNorms(query.weight.data, key.weight.data, query.eps, query.rounded)
