"""What modules and weights are called in the whole model, and in a pipeline stage's model, whose layers begin at 0."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from transformers import PreTrainedModel

from services.verifier.loading.decoder_parts import DecoderParts


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerNames:
    """Translates names of a model that has some of the layers. What is in no layer has one name in both.

    Attributes:
        prefix: in front of a layer's number.
        layers: those of the whole model that this one has.
    """

    prefix: str
    layers: range

    @classmethod
    def of(cls, model: PreTrainedModel, layers: range) -> LayerNames:
        """Those of a model that has ``layers``."""
        # A model whose parts have other names is whole, and so are its names.
        place = f"{model.base_model_prefix}.layers"
        with suppress(NotImplementedError):
            parts = DecoderParts.of(model)
            place = f"{parts.place}.{parts.layers_name}"
        return cls(prefix=f"{place}.", layers=layers)

    def in_whole(self, name: str) -> str:
        """The whole model's name of what this one calls ``name``."""
        if not name.startswith(self.prefix):
            return name
        number, rest = self._split(name)
        return f"{self.prefix}{number + self.layers.start}{rest}"

    def here(self, name: str) -> str | None:
        """This model's name of what the whole one calls ``name``; None: it is in a layer that this one does not have."""
        if not name.startswith(self.prefix):
            return name
        number, rest = self._split(name)
        return f"{self.prefix}{number - self.layers.start}{rest}" if number in self.layers else None

    def _split(self, name: str) -> tuple[int, str]:
        number, dot, rest = name.removeprefix(self.prefix).partition(".")
        return int(number), dot + rest
