"""One decoder layer of a transformers model, with the weights of an MTP layer, which it gets by the model's own rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from services.drafter.heads.mtp.block import ATTENTION
from services.model_files.known_types import known_types, transformers_version
from services.model_files.weights.for_transformers import Unread, making_a_model
from speculation.errors import ConfigurationError

# What the module behind the last layer is called.
_FINAL_NORMS = ("norm", "embedding_norm", "final_layernorm")
# Models of code of their own, whose layers are those of one that transformers knows.
_SAME_LAYERS = {"mimo": "qwen2"}


class OneLayer:
    """A model without weights, cut to the layer that resembles the MTP layer's tensors most; of several, the last.

    So models with layers of several kinds (dense and with experts, with attention and with a state) need no further rule.

    Args:
        fields: the model's config.json.
        names: of the MTP layer's tensors, within the layer.
        where: the checkpoint, for errors.

    Raises:
        ConfigurationError: the model has no such layers.
    """

    def __init__(self, fields: Mapping[str, Any], names: Iterable[str], dtype: torch.dtype, where: str) -> None:
        kind = str(fields.get("model_type"))
        kind = _SAME_LAYERS.get(kind, kind)
        known = known_types()
        if known is not None and kind not in known.causal:
            raise ConfigurationError(
                place=f"cannot load the MTP layer at {where}",
                field="model_type",
                value=kind,
                allowed=f"that of a causal language model that {transformers_version()} knows",
            )
        config = AutoConfig.for_model(**{**fields, "model_type": kind})
        with making_a_model(), torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        self._decoder = self._model.get_decoder()
        norm = next((name for name in _FINAL_NORMS if hasattr(self._decoder, name)), None)
        if norm is None or not all(hasattr(self._decoder, name) for name in ("layers", "rotary_emb")):
            raise ConfigurationError(
                f"cannot load the MTP layer at {where}: {type(self._model).__name__} has no list of layers with rotary "
                "positions and a norm behind them",
                about=where,
            )
        self._norm = type(getattr(self._decoder, norm))
        self._place = next(name for name, module in self._model.named_modules() if module is self._decoder.layers)
        held = _parts(names)
        layers: list[nn.Module] = list(self._decoder.layers)
        self.layer = min(reversed(layers), key=lambda layer: len(held ^ _parts(layer.state_dict())))
        self._decoder.layers = nn.ModuleList([self.layer])

    def norm(self) -> nn.Module:
        """A norm of the model's kind over its hidden size."""
        config = self._decoder.config
        made: nn.Module = self._norm(config.hidden_size, eps=config.rms_norm_eps)
        return made

    def rotary(self) -> nn.Module:
        """What computes position embeddings, with its frequencies, which no file holds."""
        made: nn.Module = type(self._decoder.rotary_emb)(self._decoder.config)
        return made

    def read(self, weights: Mapping[str, Unread]) -> dict[str, tuple[str, str]]:
        """Give the layer its weights, by their names within it.

        Returns:
            What is wrong, by the name of the weight: what it is (missing, unknown, a shape), and what is allowed.
        """
        prefix = f"{self._place}.0."
        info, _ = convert_and_load_state_dict_in_model(
            model=self._model,
            state_dict={prefix + name: weight for name, weight in weights.items()},
            load_config=LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(self._model)),
        )
        unknown = "unknown", f"one that {type(self.layer).__name__} has by config.json"
        wrong = {
            name: (f"{list(stored)}", f"{list(wanted)}, by config.json") for name, stored, wanted in info.mismatched_keys
        }
        wrong |= dict.fromkeys(info.missing_keys, ("missing", "")) | dict.fromkeys(info.unexpected_keys, unknown)
        wrong |= {name: (" ".join(str(error).split())[:200], "") for name, error in info.conversion_errors.items()}
        return {name.removeprefix(prefix): fault for name, fault in wrong.items() if name.startswith(prefix)}


def _parts(names: Iterable[str]) -> set[str]:
    """The modules of a layer, two levels deep; experts as one."""
    return {".".join(name.split(".")[:2]) for name in names}
