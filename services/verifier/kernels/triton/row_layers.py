"""Puts the kernels of ``row_products`` into a transformers model.

A module is replaced for what it computes, not for its name: each is tried on random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from services.model_files.weights.rounded_inputs import round_by
from services.verifier.kernels.multiplied_weight import MultipliedWeight
from services.verifier.kernels.sharded_layers import ShardedLinear
from services.verifier.kernels.shared_products import SIBLINGS, joint_layer, joint_weight, replace_by
from services.verifier.kernels.tied_layers import TiedLayers
from services.verifier.kernels.triton.byte_linear import ByteLinear, ByteType
from services.verifier.kernels.triton.rounded_rows import rounded_rows
from services.verifier.kernels.triton.row_experts import ExpertProduct, RowExperts, is_mixture, use_row_routing
from services.verifier.kernels.triton.row_gated_norm import RowGatedNorm, gated_norm_of
from services.verifier.kernels.triton.row_products import Product, RowLinear, gated, normalise, product_of

# Takes weight and bias.
MakeLayer = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]

_PARTS = ("gate_proj", "up_proj", "down_proj")
_TRIED_ROWS = 4
# Of a value: how far one more rounding may move it, in units of its type's last place.
_ROUNDINGS = 4


class RowNorm(nn.Module):
    """Replaces an RMS norm.

    Args:
        weight: [width], what a normalised row is multiplied by.
        rounded: whether the row is rounded to its own type before.
    """

    def __init__(self, weight: torch.Tensor, eps: float, rounded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps, self.rounded = eps, rounded
        # A sum that was normalised when it was made, and the result.
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is rows:
            return ahead[1]
        return normalise(rows, None, self.weight, self.eps, self.rounded)[0]

    def ahead_of(self, product: Product, residual: torch.Tensor) -> torch.Tensor:
        """``product`` + ``residual``, [..., width], which the next call is expected to be given, and normalised with it."""
        made, total = normalise(product, residual, self.weight, self.eps, self.rounded)
        self._ahead = (total, made)
        return total


class RowFeedForward(nn.Module):
    """Replaces a feed-forward part with SiLU and without biases; gate and up are one product, made by ``make``.

    Where ranks share the layer, ``down`` gathers what their gates let through.
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear | ShardedLinear, make: MakeLayer) -> None:
        super().__init__()
        self._gate_up = make(joint_weight([gate, up]), None)
        self.down_proj = down if isinstance(down, ShardedLinear) else make(down.weight, None)

    @override
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] to [..., width]."""
        made: torch.Tensor = self.down_proj(self._gates(rows))
        return made

    def product(self, rows: torch.Tensor) -> Product:
        """Of [..., width]."""
        return product_of(self.down_proj, self._gates(rows))

    def _gates(self, rows: torch.Tensor) -> torch.Tensor:
        both = self._gate_up
        return both.gated(rows) if isinstance(both, RowLinear) else gated(both(rows))


@torch.no_grad()
def use_row_kernels(model: nn.Module, make: MakeLayer = RowLinear, form: ByteType | None = None) -> list[str]:
    """Replace the layers for which there are kernels; returns the kinds of the other modules that hold weights.

    Args:
        make: makes the linear layers.
        form: of the weights of mixtures' experts, where these have eight bits.
    """
    round_by(model, rounded_rows)
    kinds: dict[type[nn.Module], bool] = {}
    tied = TiedLayers(model)
    for parent in _modules(model):
        for name in [name for name, _ in parent.named_children()]:
            child = parent.get_submodule(name)
            # Without a gate, some norms with one are plain norms.
            norm = gated_norm_of(child) or _norm_of(child)
            if norm is not None:
                setattr(parent, name, norm)
                continue
            if type(child) not in kinds:
                kinds[type(child)] = _is_gated_silu(child)
            if kinds[type(child)] and _has_gated_form(child):
                gate, up = (cast(nn.Linear, child.get_submodule(part)) for part in _PARTS[:2])
                down = cast("nn.Linear | ShardedLinear", child.get_submodule(_PARTS[2]))
                own = [part for part in (gate, up, down) if isinstance(part, nn.Linear)]
                setattr(parent, name, tied.made(own, partial(RowFeedForward, gate, up, down, make)))
    made: set[type[nn.Module]] = {
        RowNorm,
        RowGatedNorm,
        MultipliedWeight,
        nn.Embedding,
        ExpertProduct,
        RowLinear,
        ByteLinear,
    }
    for parent in _modules(model):
        if isinstance(parent, MultipliedWeight):
            parent.multiply_by(make)
            continue
        made |= _use_row_experts(parent, form)
        for layers in _products(parent):
            linears = list(layers.values())
            packed = tied.made(linears, partial(joint_layer, make, linears))
            replace_by(packed, parent, layers)
            made.add(type(packed))
    return sorted({type(module).__name__ for module in model.modules() if module._parameters and type(module) not in made})


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model. Those that are replaced meanwhile are left out, and not kept in memory."""
    for name in [name for name, _ in model.named_modules()]:
        with suppress(AttributeError):
            yield model.get_submodule(name)


def _use_row_experts(parent: nn.Module, form: ByteType | None) -> set[type[nn.Module]]:
    """Replace the experts among the children of a module; returns the types of what chooses among them by our kernels."""
    mixtures = {name: child for name, child in parent.named_children() if is_mixture(child)}
    for name, child in mixtures.items():
        setattr(parent, name, RowExperts(child, form))
    return {type(child) for child in parent.children() if mixtures and use_row_routing(child)}


def _products(parent: nn.Module) -> list[dict[str, nn.Linear]]:
    """The plain linear layers among the children of a module; those that can share a product, together."""
    own = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    found: list[dict[str, nn.Linear]] = []
    for names in SIBLINGS:
        if own.keys() >= set(names) and len({(own[name].in_features, own[name].weight.dtype) for name in names}) == 1:
            found.append({name: own.pop(name) for name in names})
    return found + [{name: child} for name, child in own.items()]


def _norm_of(module: nn.Module) -> RowNorm | None:
    """What replaces an RMS norm (arXiv:1910.07467) over the last dimension; None if ``module`` computes something else.

    Families differ in whether they round before the weight, and whether one is added to it.
    """
    weight, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    plain = len(module._parameters) == 1 and not module._buffers and not list(module.children())
    if not plain or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    rows = _tried(len(weight), weight)
    expected = _made(module, rows)
    if expected is None:
        return None
    forms = [(weight, True), (weight.float(), False), (1 + weight.float(), False)]
    distances = [float((_normalised(rows, own, eps, rounded) - expected).abs().max()) for own, rounded in forms]
    best = min(range(len(forms)), key=distances.__getitem__)
    if not distances[best] <= _ROUNDINGS * torch.finfo(rows.dtype).eps * float(expected.abs().max()):
        return None
    return RowNorm(forms[best][0], eps, forms[best][1])


def _normalised(rows: torch.Tensor, weight: torch.Tensor, eps: float, rounded: bool) -> torch.Tensor:
    scaled = rows.float() * (rows.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return ((scaled.to(rows.dtype) if rounded else scaled) * weight).to(rows.dtype).float()


def _has_gated_form(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in _PARTS]
    if isinstance(parts[2], ShardedLinear):
        parts[2] = parts[2].own
    return all(type(part) is nn.Linear and part.bias is None for part in parts) and len(module._parameters) == 0


def _is_gated_silu(module: nn.Module) -> bool:
    """Whether it multiplies SiLU of one product by another, and that by a third."""
    if not _has_gated_form(module):
        return False
    gate, up, down = (cast(nn.Linear, module.get_submodule(name)) for name in _PARTS)
    rows = _tried(gate.in_features, gate.weight)
    expected = _made(module, rows)
    if expected is None:
        return False
    made = down(functional.silu(gate(rows)) * up(rows)).float()
    return bool((made - expected).abs().max() <= _ROUNDINGS * torch.finfo(rows.dtype).eps * expected.abs().max())


def _tried(width: int, like: torch.Tensor) -> torch.Tensor:
    """[1, rows, width] random numbers, of the type and on the device of ``like``."""
    return torch.randn(1, _TRIED_ROWS, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(like)


def _made(module: nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """What a module makes of rows, float32; None if it takes something else."""
    try:
        made = module(rows)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None
    return made.float() if isinstance(made, torch.Tensor) and made.shape == rows.shape else None
