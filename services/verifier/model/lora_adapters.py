"""LoRA adapters of linear layers and of the embedding, each for the rows of the requests that ask for it.

Rows of noise, by which the target drafts, have an adapter of their own, whatever their request has.

A row's numbers depend on the row alone: what its adapter adds is computed for the row by itself, in one order of its sums,
after what the layer makes. So a request gets the same bits whichever adapters share its pass.

Where ranks share a layer, each adds to the outputs that it makes, before they are gathered: it holds ``up`` for these alone
and all of ``down``; of an embedding, all of ``up`` and the columns of its own tokens. So no sum crosses ranks, and the bits
are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.kernels.native.layer_adapter import AdaptedRows, LayerAdapter
from services.verifier.kernels.native.layer_kernel import FusedLayer
from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.low_rank_kernel import AddLowRank, LowRank, PackedLowRank
from services.verifier.kernels.sharded_layers import own_part
from services.verifier.loading.layer_names import LayerNames
from services.verifier.loading.peft_folder import AdaptableLayer, StoredAdapter
from services.verifier.model.adaptable_layers import described
from services.verifier.model.target_port import Rows
from services.verifier.stages.stage_ranks import Cut, StageRanks

_Hook = torch.utils.hooks.RemovableHandle


class _OfLinear:
    """What an adapter adds to a linear layer."""

    def __init__(self, product: LowRank) -> None:
        self.packed = PackedLowRank(product)

    def inputs(self, given: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """What is multiplied for some rows of what the layer was given: [rows, inputs]."""
        return given.reshape(-1, given.shape[-1])[first : first + rows]


class _OfEmbedding:
    """What an adapter adds to an embedding: a token's column of ``down``, which takes no product to find, times ``up``.

    Args:
        scale: what the embedding multiplies its own rows by.
    """

    def __init__(self, product: LowRank, scale: float) -> None:
        self._columns = product.down.T.contiguous()
        # The kernel multiplies twice. The first product changes no bit of the column.
        same = torch.eye(len(product.down), dtype=product.up.dtype)
        self.packed = PackedLowRank(LowRank(down=same, up=product.up, scale=product.scale * scale))

    def inputs(self, given: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """As of a linear layer, for tokens."""
        return self._columns[given.flatten()[first : first + rows]].float()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Adapter:
    """An adapter, as kernels read it. ``of_layers``: in whole layers; ``of_modules``: in all others."""

    digest: str
    where: str
    of_layers: Mapping[nn.Module, LayerAdapter]
    of_modules: Mapping[nn.Module, _OfLinear | _OfEmbedding]


@dataclass(kw_only=True, slots=True)
class _Layer:
    """A whole layer, and the products of an adapter that belong to its linear parts."""

    module: nn.Module
    products: dict[str, LowRank] = field(default_factory=dict)


class LoraAdapters:
    """The adapters of a model, or of the layers that a pipeline stage has of one, and which request has which.

    Args:
        modules: those that may be adapted, by name.
        layers: those of the whole model that this one has; names count from the whole model's.
        shards: those of the layers that this process holds; None: the whole layers.

    Attributes:
        layers: what adapters of the whole model's modules have to fit, by name; a stage knows its own until it is told.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Mapping[str, nn.Module],
        kernels: Library,
        layers: range,
        shards: StageRanks | None = None,
    ) -> None:
        named = LayerNames.of(model, layers).in_whole
        weights = {} if shards is None else shards.cuts
        cuts = {name: weights[f"{name}.weight"] for name in modules if f"{name}.weight" in weights}
        self._modules = {named(name): module for name, module in modules.items()}
        self._cuts: dict[str, Cut] = {named(name): cut for name, cut in cuts.items()}
        self.layers: Mapping[str, AdaptableLayer] = described(model, self._modules, self._cuts)
        self._head = own_part(model.get_output_embeddings())
        self._add = AddLowRank(kernels)
        self._whole = {
            named(name): module for name, module in model.named_modules() if isinstance(module.forward, FusedLayer)
        }
        self._adapters: dict[str, _Adapter] = {}
        self._of_request: dict[str, _Adapter] = {}
        self._of_noise: _Adapter | None = None

    @property
    def digests(self) -> dict[str, str]:
        """Of the adapters, by name."""
        return {name: adapter.digest for name, adapter in self._listed()}

    @property
    def folders(self) -> dict[str, str]:
        """Where they were read, by name."""
        return {name: adapter.where for name, adapter in self._listed()}

    def _listed(self) -> list[tuple[str, _Adapter]]:
        """All of them, copied at once: another thread may load one meanwhile."""
        return list(self._adapters.items())

    def add(self, name: str, stored: StoredAdapter) -> None:
        """Let requests have an adapter that was read for this model. May be called while passes run.

        What it has for layers of other stages is left out, and for outputs of other ranks.
        """
        self._adapters[name] = self._made(stored)

    def draft_by(self, stored: StoredAdapter) -> None:
        """Let rows of noise have an adapter that was read for this model."""
        self._of_noise = self._made(stored)

    def draft_by_added(self, name: str) -> None:
        """Let rows of noise have an adapter that was added, which requests may have no longer."""
        self._of_noise = self._adapters.pop(name)

    @property
    def of_noise(self) -> tuple[str, str] | None:
        """Where the adapter of rows of noise was read, and its digest; None: they have none."""
        return None if self._of_noise is None else (self._of_noise.where, self._of_noise.digest)

    def _made(self, stored: StoredAdapter) -> _Adapter:
        layers: dict[str, _Layer] = {}
        modules: dict[nn.Module, _OfLinear | _OfEmbedding] = {}
        for name_of_module, whole in stored.products.items():
            layer = next((layer for layer in self._whole if name_of_module.startswith(f"{layer}.")), None)
            module = self._modules.get(name_of_module)
            if module is None:
                continue
            product = _part_of(whole, self._cuts.get(name_of_module), of_tokens=isinstance(module, nn.Embedding))
            if layer is not None:
                own = layers.setdefault(layer, _Layer(module=self._whole[layer]))
                own.products[name_of_module.removeprefix(f"{layer}.")] = product
            elif isinstance(module, nn.Embedding):
                modules[module] = _OfEmbedding(product, float(getattr(module, "embed_scale", 1.0)))
            else:
                modules[module] = _OfLinear(product)
        return _Adapter(
            digest=stored.digest,
            where=stored.where,
            of_layers={each.module: _forward(each.module).adapter(each.products) for each in layers.values()},
            of_modules=modules,
        )

    def digests_of(self, batch: Sequence[Rows]) -> list[str]:
        """Of what each entry has; empty: it has none."""
        own = (self._of_request.get(rows.request_id) for rows in batch)
        return ["" if adapter is None else adapter.digest for adapter in own]

    def remove(self, name: str) -> None:
        """Drop an adapter. Requests that have it keep it."""
        del self._adapters[name]

    def assign(self, request_id: str, name: str) -> None:
        """Give a request an adapter."""
        self._of_request[request_id] = self._adapters[name]

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request, which may be nothing."""
        self._of_request.pop(request_id, None)

    def forget_all(self) -> None:
        """Drop what is known of all requests."""
        self._of_request.clear()

    def rows_of(self, batch: Sequence[Rows], stream_rows: Sequence[int] | None = None) -> list[AdaptedRows]:
        """The rows of a pass that have adapters, in whole layers.

        Args:
            stream_rows: of each entry, the number of its last rows, which come behind all others and have none.
        """
        behind = stream_rows or [0] * len(batch)
        ranges = [range(len(rows.tokens) - others) for rows, others in zip(batch, behind, strict=True)]
        # Rows that have the same adapter follow one another, so that its weights are still in a cache.
        spans = sorted(self._spans(batch, ranges), key=lambda span: id(span[0]))
        return [
            AdaptedRows(first=first, rows=rows, of_layers=adapter.of_layers)
            for adapter, first, rows in spans
            if adapter.of_layers
        ]

    @contextmanager
    def within(self, batch: Sequence[Rows]) -> Iterator[None]:
        """Let the rows of ``batch`` have their adapters while the model's other layers run: they have hooks meanwhile."""
        spans: dict[nn.Module, list[tuple[_OfLinear | _OfEmbedding, int, int]]] = {}
        # The output layer takes only the rows that are read.
        read = [range(len(rows.tokens) - rows.read, len(rows.tokens)) for rows in batch]
        for at_head, ranges in ((False, [range(len(rows.tokens)) for rows in batch]), (True, read)):
            for adapter, first, rows in self._spans(batch, ranges):
                for module, product in adapter.of_modules.items():
                    if (module is self._head) == at_head:
                        spans.setdefault(module, []).append((product, first, rows))
        hooks = [module.register_forward_hook(partial(self._add_to, own)) for module, own in spans.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _spans(self, batch: Sequence[Rows], ranges: Sequence[range]) -> list[tuple[_Adapter, int, int]]:
        """Adapters, the first row of each, and for how many rows; neighbours with the same one are together.

        Args:
            ranges: which of each entry's rows there are.
        """
        spans: list[tuple[_Adapter, int, int]] = []
        begin = 0
        for rows, own in zip(batch, ranges, strict=True):
            for adapter, part in self._parts(rows, own):
                first = begin + part.start - own.start
                if spans and spans[-1][0] is adapter and sum(spans[-1][1:]) == first:
                    spans[-1] = adapter, spans[-1][1], spans[-1][2] + len(part)
                else:
                    spans.append((adapter, first, len(part)))
            begin += len(own)
        return spans

    def _parts(self, rows: Rows, own: range) -> Iterator[tuple[_Adapter, range]]:
        """Adapters, and which of an entry's rows ``own`` have each."""
        adapter, at = self._of_request.get(rows.request_id), own.start
        for noise in rows.noise:
            if noise not in own:
                continue
            if adapter is not None and noise > at:
                yield adapter, range(at, noise)
            if self._of_noise is not None:
                yield self._of_noise, range(noise, noise + 1)
            at = noise + 1
        if adapter is not None and own.stop > at:
            yield adapter, range(at, own.stop)

    def _add_to(
        self,
        spans: Sequence[tuple[_OfLinear | _OfEmbedding, int, int]],
        module: nn.Module,
        given: tuple[torch.Tensor, ...],
        made: torch.Tensor,
    ) -> None:
        outputs = made.view(-1, made.shape[-1])
        for product, first, rows in spans:
            self._add(product.packed, product.inputs(given[0], first, rows), outputs[first : first + rows])


def _part_of(product: LowRank, cut: Cut | None, *, of_tokens: bool) -> LowRank:
    """What a rank needs of a product, beside its part of the layer; None: it has all of the layer."""
    if cut is None:
        return product
    if of_tokens:
        return replace(product, down=cut.part_of(product.down, 1))
    return replace(product, up=cut.part_of(product.up, 0))


def _forward(layer: nn.Module) -> FusedLayer:
    forward: Any = layer.forward
    assert isinstance(forward, FusedLayer)
    return forward
