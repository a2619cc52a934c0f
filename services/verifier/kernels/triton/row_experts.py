"""Mixtures of experts whose rows do not depend on what shares their pass; see ``device.expert_rows``.

A row gets the bits that it would get from ``RowLinear`` layers of its experts, one after the other. Ranks that share a
mixture gather as in ``experts``: whole rows before the second products, and columns once a row's experts are added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import triton
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from services.verifier.kernels.sharded_layers import shards_of
from services.verifier.kernels.triton.byte_linear import ByteLinear, ByteType
from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.expert_rows import BLOCK_INTS, add_pairs, list_pairs, multiply_pairs
from services.verifier.kernels.triton.row_products import (
    LANES,
    LEAST_ROWS,
    MOST_ROWS,
    RowLinear,
    Tiles,
)

_TRIED_ROWS = 4
# Where gates differ in their form, and beyond what models clamp numbers to.
_TRIED_SCALES = (1.0, 64.0)
# Of a value: how far one more rounding may move it, in units of its type's last place.
_ROUNDINGS = 4
# The least number of bins that the list of pairs counts in.
_LEAST_BINS = 128
# What multiplies otherwise than ``functional.linear``.
_OTHER_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv", "dot"}


class ChosenPairs(NamedTuple):
    """The pairs of a pass, listed by expert.

    Attributes:
        chosen: [rows, experts per row], int64.
        pairs, blocks: see ``device.expert_rows.list_pairs``.
        size: pairs of a block, at most.
    """

    chosen: torch.Tensor
    pairs: torch.Tensor
    blocks: torch.Tensor
    size: int

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> ChosenPairs:
        """Those of ``chosen``. Sizes follow from its shape alone, as captured passes need them."""
        chosen = chosen.contiguous()
        count = chosen.numel()
        # About twice as many as an expert has on average. It changes no bit.
        size = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(-(-2 * count // experts))))
        # Every expert that is chosen may fill its last block with a single pair.
        begun = min(count, experts)
        most = begun + (count - begun) // size
        pairs, blocks = (chosen.new_empty(shape, dtype=torch.int32) for shape in ((count,), (most, BLOCK_INTS)))
        list_pairs[(experts,)](
            chosen, pairs, blocks, count, most, EXPERTS=experts,
            BINS=max(_LEAST_BINS, triton.next_power_of_2(experts + 1)), ROWS=size, **COMPILED,
        )  # fmt: skip
        return cls(chosen, pairs, blocks, size)


class ExpertProduct(nn.Module):
    """One matrix of each expert.

    Args:
        weight: [experts, outputs, inputs].
        bias: [experts, outputs].
        form: of bytes, with a scale for each output of each expert; None: weights stay as they are.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, form: ByteType | None) -> None:
        super().__init__()
        self.experts, self.columns, self.terms = weight.shape
        flat = weight.detach().flatten(0, 1)
        self.held = RowLinear(flat) if form is None else ByteLinear(flat, form=form)
        self.bias = None if bias is None else nn.Parameter(bias.detach().contiguous(), requires_grad=False)

    def product(self, rows: torch.Tensor, pairs: ChosenPairs, top: int, *, gated: bool = False) -> torch.Tensor:
        """[pairs, columns], or half as many if ``gated``, of a row for every ``top`` pairs, [pairs / top, terms]."""
        columns = self.columns // 2 if gated else self.columns
        made = rows.new_empty(len(pairs.pairs), columns)
        weights, leaf = self.held.weights(), self.held.leaf
        tiles = Tiles.of(pairs.size, leaf, gated=gated, size=weights.size)
        multiply_pairs[(len(pairs.blocks), -(-columns // tiles.columns))](
            rows.contiguous(), weights.numbers, weights.scales, made if self.bias is None else self.bias, made, pairs.pairs,
            pairs.blocks, columns, leaf, self.terms, weights.numbers.shape[1], TOP=top, ROWS=tiles.rows,
            COLUMNS=tiles.columns, TERMS=tiles.terms, BIAS=self.bias is not None, GATED=gated,
            BYTES=weights.shift is not None, SHIFT=weights.shift or 0, num_stages=tiles.stages, **COMPILED,
        )  # fmt: skip
        return made


class RowExperts(nn.Module):
    """Replaces a module of experts that follows transformers' experts interface.

    What stands between an expert's two products is the module's own, but for SiLU gates, which are part of the first.

    Args:
        own: the module, which loses its weights.
        form: of weights of eight bits; None: they stay as they are.
    """

    def __init__(self, own: nn.Module, form: ByteType | None = None) -> None:
        super().__init__()
        self._gates = _gates_by_silu(own)
        self.up = _taken(own, "gate_up_proj" if own.has_gate else "up_proj", form)
        self.down = _taken(own, "down_proj", form)
        self.own = own

    @override
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """As ``experts.experts``."""
        count, top = top_k_index.shape
        experts, own, shards = self.up.experts, cast(Any, self.own), shards_of(self.own)
        pairs = ChosenPairs.of(top_k_index, experts)
        made = self.up.product(hidden_states, pairs, top, gated=self._gates)
        if not self._gates:
            made = own._apply_gate(made) if own.has_gate else own.act_fn(made)
        made = self.down.product(made if shards is None else shards.columns(made), pairs, 1)
        # The oldest transformers that is taken does not have it yet.
        if getattr(own, "has_post_expert_norm", False):
            made = own.post_expert_norm(made)
        total = hidden_states.new_empty(count, self.down.columns)
        add_pairs[(count, -(-self.down.columns // LANES))](
            made, pairs.chosen, top_k_weights.contiguous(), total, self.down.columns, EXPERTS=experts, TOP=top,
            TOPS=triton.next_power_of_2(top), BLOCK=LANES, **COMPILED,
        )  # fmt: skip
        return total if shards is None else shards.columns(total)


def is_mixture(module: nn.Module) -> TypeGuard[nn.Module]:
    """Whether its experts follow transformers' experts interface, whose decorator sets these attributes."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and "down_proj" in module._parameters


def _taken(own: nn.Module, name: str, form: ByteType | None) -> ExpertProduct:
    weight, bias = getattr(own, name), getattr(own, f"{name}_bias") if own.has_bias else None
    made = ExpertProduct(weight.transpose(1, 2) if own.is_transposed else weight, bias, form)
    delattr(own, name)
    if bias is not None:
        delattr(own, f"{name}_bias")
    return made


def _gates_by_silu(own: Any) -> bool:
    """Whether SiLU of the first half of a product, times the second half, is all that stands between its products."""
    if not own.has_gate or own.has_bias:
        return False
    width = own.gate_up_proj.shape[2 if own.is_transposed else 1] // 2
    rows = torch.randn(_TRIED_ROWS, 2 * width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return all(_is_silu(own._apply_gate, rows * scale) for scale in _TRIED_SCALES)


def _is_silu(gate: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    first, second = rows.chunk(2, -1)
    expected, made = gate(rows), functional.silu(first) * second
    return bool((made - expected).abs().max() <= _ROUNDINGS * torch.finfo(rows.dtype).eps * expected.abs().max())


class RowRouting(TorchFunctionMode):
    """Within the context ``functional.linear`` is a product of ``RowLinear``."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function; the signature is torch's."""
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        return _linear(*args, **(kwargs or {}))


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    made: torch.Tensor = RowLinear(weight, bias)(rows)
    return made


def use_row_routing(router: nn.Module) -> bool:
    """Let our kernels compute the product by which a module chooses experts; False: it is not of the known form.

    Scores and choices stay torch's.
    """
    weight = router._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(router, (nn.Linear, nn.Embedding)):
        return False
    noted = _NotedProducts()
    rows = torch.randn(_TRIED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(
        weight
    )
    try:
        with noted:
            router(rows)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False
    if noted.linear != 1 or noted.others:
        return False
    router.forward = partial(_routed, router)
    return True


def _routed(router: nn.Module, *given: Any, **named: Any) -> Any:
    with RowRouting():
        return type(router).forward(router, *given, **named)


class _NotedProducts(TorchFunctionMode):
    """Counts the products within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = self.others = 0

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.linear += func is functional.linear
        self.others += getattr(func, "__name__", "") in _OTHER_PRODUCTS
        return func(*args, **(kwargs or {}))
