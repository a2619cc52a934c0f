"""LoRA adapters of the linear layers, each for the rows of the requests that ask for it.

A row's numbers depend on the row alone: what its adapter adds is computed for the row by itself, in one order of its sums,
after what the layer makes. So a request gets the same bits whichever adapters share its pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.kernels.native.layer_adapter import AdaptedRows, LayerAdapter
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.low_rank_kernel import AddLowRank, LowRank, PackedLowRank
from services.verifier.loading.peft_folder import Sizes, StoredAdapter
from services.verifier.model.target_port import Rows

_Hook = torch.utils.hooks.RemovableHandle


@contextmanager
def noting_linears(model: PreTrainedModel, rows: int) -> Iterator[dict[str, nn.Module]]:
    """Note, in a pass over so many rows, the linear layers that take all of them, once: by name, after the pass.

    The output layer is none of them, since it takes only the rows that are read.
    """
    calls: dict[str, list[bool]] = {}
    found: dict[str, nn.Module] = {}

    def note(name: str, module: nn.Module, given: tuple[Any, ...], made: object) -> None:
        whole = given[0].shape in ((1, rows, given[0].shape[-1]), (rows, given[0].shape[-1]))
        calls.setdefault(name, []).append(whole and isinstance(made, torch.Tensor))

    modules = {
        name: module
        for name, module in model.named_modules()
        # What layers share their product by is none of the model's own modules.
        if hasattr(module, "in_features") and not name.endswith(".packed")
    }
    hooks = [module.register_forward_hook(partial(note, name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    head = model.get_output_embeddings()
    found.update((name, modules[name]) for name, seen in calls.items() if seen == [True] and modules[name] is not head)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Adapter:
    """An adapter, as kernels read it. ``of_layers``: in whole layers; ``of_linears``: in all others."""

    digest: str
    of_layers: Mapping[nn.Module, LayerAdapter]
    of_linears: Mapping[nn.Module, PackedLowRank]


@dataclass(kw_only=True, slots=True)
class _Layer:
    """A whole layer, and the products of an adapter that belong to its linear parts."""

    module: nn.Module
    products: dict[str, LowRank] = field(default_factory=dict)


class LoraAdapters:
    """The adapters of a model, and which request has which.

    Args:
        linears: the layers that may be adapted, by name.
    """

    def __init__(self, model: PreTrainedModel, linears: Mapping[str, nn.Module], kernels: Library) -> None:
        self._linears = linears
        self._add = AddLowRank(kernels)
        self._whole = {name: module for name, module in model.named_modules() if isinstance(module.forward, FusedLayer)}
        self._adapters: dict[str, _Adapter] = {}
        self._of_request: dict[str, _Adapter] = {}

    @property
    def sizes(self) -> dict[str, Sizes]:
        """Inputs and outputs of the layers that may be adapted."""
        sizes = {name: (module.in_features, module.out_features) for name, module in self._linears.items()}
        return sizes  # type: ignore[return-value]

    @property
    def digests(self) -> dict[str, str]:
        """Of the adapters, by name."""
        return {name: adapter.digest for name, adapter in self._adapters.items()}

    def add(self, name: str, stored: StoredAdapter) -> None:
        """Let requests have an adapter that was read for this model. May be called while passes run."""
        layers: dict[str, _Layer] = {}
        linears: dict[nn.Module, PackedLowRank] = {}
        for module, product in stored.products.items():
            layer = next((layer for layer in self._whole if module.startswith(f"{layer}.")), None)
            if layer is None:
                linears[self._linears[module]] = PackedLowRank(product)
            else:
                own = layers.setdefault(layer, _Layer(module=self._whole[layer]))
                own.products[module.removeprefix(f"{layer}.")] = product
        self._adapters[name] = _Adapter(
            digest=stored.digest,
            of_layers={each.module: _forward(each.module).adapter(each.products) for each in layers.values()},
            of_linears=linears,
        )

    def remove(self, name: str) -> None:
        """Drop an adapter. Requests that have it keep it."""
        del self._adapters[name]

    def assign(self, request_id: str, name: str) -> None:
        """Give a request an adapter; empty: none."""
        if name:
            self._of_request[request_id] = self._adapters[name]

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request, which may be nothing."""
        self._of_request.pop(request_id, None)

    def rows_of(self, batch: Sequence[Rows], stream_rows: Sequence[int] | None = None) -> list[AdaptedRows]:
        """The rows of a pass that have adapters, in whole layers.

        Args:
            stream_rows: of each entry, the number of its last rows, which come behind all others and have none.
        """
        spans = self._spans(batch, stream_rows or [0] * len(batch))
        return [
            AdaptedRows(first=first, rows=rows, of_layers=adapter.of_layers)
            for adapter, first, rows in spans
            if adapter.of_layers
        ]

    @contextmanager
    def within(self, batch: Sequence[Rows]) -> Iterator[None]:
        """Let the rows of ``batch`` have their adapters while the model's other layers run: they have hooks meanwhile."""
        spans: dict[nn.Module, list[tuple[PackedLowRank, int, int]]] = {}
        for adapter, first, rows in self._spans(batch, [0] * len(batch)):
            for module, product in adapter.of_linears.items():
                spans.setdefault(module, []).append((product, first, rows))
        hooks = [module.register_forward_hook(partial(self._add_to, own)) for module, own in spans.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _spans(self, batch: Sequence[Rows], behind: Sequence[int]) -> list[tuple[_Adapter, int, int]]:
        """Adapters, the first row of each, and for how many rows; neighbours with the same one are together."""
        spans: list[tuple[_Adapter, int, int]] = []
        begin = 0
        for rows, others in zip(batch, behind, strict=True):
            count, adapter = len(rows.tokens) - others, self._of_request.get(rows.request_id)
            if adapter is not None and spans and spans[-1][0] is adapter and sum(spans[-1][1:]) == begin:
                spans[-1] = adapter, spans[-1][1], spans[-1][2] + count
            elif adapter is not None:
                spans.append((adapter, begin, count))
            begin += count
        return spans

    def _add_to(
        self,
        spans: Sequence[tuple[PackedLowRank, int, int]],
        module: nn.Module,
        given: tuple[torch.Tensor, ...],
        made: torch.Tensor,
    ) -> None:
        inputs, outputs = given[0].reshape(-1, given[0].shape[-1]), made.view(-1, made.shape[-1])
        for product, first, rows in spans:
            self._add(product, inputs[first : first + rows], outputs[first : first + rows])


def _forward(layer: nn.Module) -> FusedLayer:
    forward: Any = layer.forward
    assert isinstance(forward, FusedLayer)
    return forward
