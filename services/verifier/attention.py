"""Tree attention over the pool, plugged into transformers' attention interface.

A pass lays the rows of all requests side by side in one sequence of batch size one. The model hands each layer's queries,
keys and values to ``attend``; the pass stores the new keys and values in the pool and lets every row see its own request:
the committed tokens, and its ancestors in the tree.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from transformers import AttentionInterface

NAME = "outrider"

# Most nodes of one request's tree. Up to 192 terms torch's matrix products add strictly from the first to the last on the
# CPUs that we know; tiled_attention multiplies by a tile and the tree behind it.
MAX_NODES = 128


class Pass(Protocol):
    """What one forward pass needs besides its token ids.

    What a row's attention is summed up from is added in the order of positions, so that a token gets the same bits, whether
    it is prefilled, decoded alone, or checked among other drafts.
    """

    @property
    def positions(self) -> torch.Tensor:
        """[rows], of each row in its own request."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        """Store the rows' keys and values, and attend.

        Args:
            query: [heads, rows, head size].
            key: [key-value heads, rows, head size]; ``value`` likewise.
            window: a row sees so many positions, its own included; None: all up to its own.

        Returns:
            [rows, heads, head size].
        """
        ...


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    outrider_pass: Pass | None = None,
    **_hints: object,
) -> tuple[torch.Tensor, None]:
    """One layer's attention; the signature is transformers'.

    Args:
        query: [1, heads, rows, head size].
        key: [1, key-value heads, rows, head size]; ``value`` likewise.

    Returns:
        [1, rows, heads, head size].

    Raises:
        NotImplementedError: the architecture needs something of attention that this does not do.
    """
    if outrider_pass is None:
        raise NotImplementedError("it does not hand keyword arguments down to its attention layers")
    for name, given in (("softcap", softcap), ("s_aux", s_aux), ("position_bias", position_bias)):
        if given is not None:
            raise NotImplementedError(f"attention with {name} is not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = outrider_pass.attend(layer, query[0], key[0], value[0], scale, sliding_window)
    return output[None].to(query.dtype), None


def register() -> None:
    """Make ``attn_implementation="outrider"`` known to transformers."""
    AttentionInterface.register(NAME, attend)
