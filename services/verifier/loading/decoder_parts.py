"""What models call the parts that a pipeline stage has or leaves out, and how a model is cut down to a stage's.

This is the one place that knows these names. A layer knows its kind from when it was made, as one of the whole model's. Some
decoders ask the configuration again in each pass, by a layer's place among those that there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

_LAYERS = ("layers", "blocks")
_EMBEDDINGS = ("embed_tokens", "embeddings")
# What is applied after the last layer.
_NORMS = ("norm", "embedding_norm", "final_layernorm", "norm_f", "final_norm", "ln_out")
_ROTARY = ("rotary_emb", "pos_emb")
_HEADS = ("lm_head", "head")
# By what decoders multiply what enters their first layer, be it embedded by them or given.
_SCALES = ("embedding_multiplier", "normalizer")
# What some layers read beside hidden states: what the first layer is given.
EMBEDDED = "original_hidden_states"
# The lists in a configuration that say a layer's kind by its place.
_KINDS = ("layer_types", "layers_block_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderParts:
    """A model's parts, by what it calls them.

    Attributes:
        decoder: computes hidden states; the other names are of its own parts, but for ``head_name``.
        place: the name of the decoder in the model.
        head_name: of the output layer, in the model.
    """

    model: PreTrainedModel
    decoder: nn.Module
    place: str
    layers_name: str
    embeddings_name: str
    norm_name: str
    head_name: str

    @classmethod
    def of(cls, model: PreTrainedModel) -> DecoderParts:
        """Those of a model.

        Raises:
            NotImplementedError: it has others, or calls one of them otherwise than any that is known; says which.
        """
        decoder = model.get_decoder()
        place = next(name for name, module in model.named_modules() if module is decoder)
        if not place:
            raise NotImplementedError("its decoder is no part of its own")
        return cls(
            model=model, decoder=decoder, place=place, layers_name=_named(decoder, _LAYERS),
            embeddings_name=_named(decoder, _EMBEDDINGS), norm_name=_named(decoder, _NORMS), head_name=_named(model, _HEADS),
        )  # fmt: skip

    @property
    def layers(self) -> nn.ModuleList:
        found: nn.ModuleList = getattr(self.decoder, self.layers_name)
        return found

    @property
    def norm(self) -> nn.Module:
        found: nn.Module = getattr(self.decoder, self.norm_name)
        return found

    @property
    def read_embeddings(self) -> bool:
        """Whether layers also read what rows are embedded as."""
        return any(EMBEDDED in inspect.signature(layer.forward).parameters for layer in self.layers)

    def keep(self, layers: range) -> None:
        """Cut the whole model, without weights, down to ``layers``, and to the embeddings and output layer next to them.

        The embeddings also stay where layers read them.

        Raises:
            AttributeError: the kinds of its layers cannot be set.
        """
        embeds = self.read_embeddings
        first, last = layers.start == 0, layers.stop == len(self.layers)
        text = self.model.config.get_text_config()
        _keep_kinds(text, layers)
        setattr(self.decoder, self.layers_name, nn.ModuleList(self.layers[layers.start : layers.stop]))
        if not first:
            if not embeds:
                setattr(self.decoder, self.embeddings_name, nn.Identity())
            self._leave_scale()
        if not last:
            setattr(self.decoder, self.norm_name, nn.Identity())
            setattr(self.model, self.head_name, nn.Identity())
        for name in _ROTARY:
            if (rotary := getattr(self.decoder, name, None)) is not None:
                # Made again, since its kinds of layers are those of the stage.
                setattr(self.decoder, name, type(rotary)(text))

    def _leave_scale(self) -> None:
        """Multiply what the stage before hands on by one."""
        for name in _SCALES:
            scale = getattr(self.decoder, name, None)
            if isinstance(scale, torch.Tensor):
                setattr(self.decoder, name, torch.ones_like(scale))
            elif scale is not None:
                setattr(self.decoder, name, 1.0)

    @contextmanager
    def without_layers(self) -> Iterator[None]:
        """Within the block, the decoder has neither layers nor what is behind them."""
        text = self.model.config.get_text_config()
        layers, norm, count = self.layers, self.norm, text.num_hidden_layers
        setattr(self.decoder, self.layers_name, nn.ModuleList())
        setattr(self.decoder, self.norm_name, nn.Identity())
        text.num_hidden_layers = 0
        try:
            yield
        finally:
            setattr(self.decoder, self.layers_name, layers)
            setattr(self.decoder, self.norm_name, norm)
            text.num_hidden_layers = count


def _named(module: nn.Module, names: tuple[str, ...]) -> str:
    """The first of ``names`` that a module has.

    Raises:
        NotImplementedError: it has none.
    """
    for name in names:
        if hasattr(module, name):
            return name
    raise NotImplementedError(f"no part of {type(module).__name__} is called {' or '.join(names)}")


def _keep_kinds(text: PreTrainedConfig, layers: range) -> None:
    """Let a configuration be that of these layers: their number and, by their places among them, their kinds.

    Raises:
        AttributeError: the kinds cannot be set.
    """
    own = {text.attribute_map.get(name, name) for name in _KINDS}
    kinds = {name: list(found)[layers.start : layers.stop] for name in own if (found := getattr(text, name, None))}
    derived = {name for name in kinds if isinstance(inspect.getattr_static(type(text), name, None), property)}
    text.num_hidden_layers = len(layers)
    for name in kinds.keys() - derived:
        setattr(text, name, kinds[name])
    if derived:
        # Derived from a layer's number in the whole model. The class is this configuration's own.
        fixed: dict[str, Any] = {name: property(_always(kinds[name])) for name in derived}
        object.__setattr__(text, "__class__", type(type(text).__name__, (type(text),), fixed))


def _always(kinds: list[str]) -> Any:
    return lambda self: kinds
