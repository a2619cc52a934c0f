"""The embeddings of a pass's rows, for layers of later stages that read them.

The layers of some models read it beside the hidden states (Zamba's shared block, Glorioso et al., 2405.16712, figure 2). The
first stage's embeddings are not handed on, since every stage knows the tokens: it keeps the matrix, and embeds them itself.
Such layers are also given their number in the model, which a decoder counts from its own first layer on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from services.verifier.loading.decoder_parts import EMBEDDED, DecoderParts

_NUMBER = "layer_idx"


class EmbeddedRows:
    """Gives layers what they read.

    Outside of ``of``, they read what the decoder gives them.

    Args:
        layers: of the whole model, those that ``parts`` has.
    """

    def __init__(self, parts: DecoderParts, layers: range) -> None:
        self._embeddings: nn.Module = getattr(parts.decoder, parts.embeddings_name)
        self._embedded: torch.Tensor | None = None
        for number, layer in zip(layers, parts.layers, strict=True):
            places = {name: place for place, name in enumerate(inspect.signature(layer.forward).parameters)}
            layer.register_forward_pre_hook(partial(self._entering, number, places), with_kwargs=True)

    @contextmanager
    def of(self, tokens: torch.Tensor) -> Iterator[None]:
        """Within the block, rows are of these tokens, [texts, rows]."""
        self._embedded = self._embeddings(tokens)
        try:
            yield
        finally:
            self._embedded = None

    def _entering(
        self, number: int, places: Mapping[str, int], layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own, named = list(given), dict(named)
        wanted: dict[str, Any] = {} if self._embedded is None else {EMBEDDED: self._embedded}
        for name, value in (wanted | {_NUMBER: number}).items():
            if name in named or places[name] >= len(own):
                named[name] = value
            else:
                own[places[name]] = value
        return tuple(own), named


def embedded_rows(model: PreTrainedModel, layers: range) -> EmbeddedRows | None:
    """Of a stage with these layers; None: they read no embeddings, or the stage embeds its rows anyway."""
    if layers.start == 0:
        return None
    parts = DecoderParts.of(model)
    return EmbeddedRows(parts, layers) if parts.read_embeddings else None


def embedding(rows: EmbeddedRows | None, tokens: torch.Tensor) -> AbstractContextManager[None]:
    """As ``EmbeddedRows.of``."""
    return nullcontext() if rows is None else rows.of(tokens)
