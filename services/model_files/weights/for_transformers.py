"""Lets transformers make models one by one, also from weights that it cannot read itself: quantised, shared, blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from services.model_files.weights.files import WeightFiles

_MAKING = threading.RLock()


@contextmanager
def making_a_model() -> Iterator[None]:
    """Keep other threads from making a model meanwhile.

    transformers replaces methods of its models' class, and torch's default type, for the whole process as long as it makes
    one. Two threads at once would put back what the other one had replaced: tied weights would be missing from then on.
    """
    with _MAKING:
        yield


@dataclass(frozen=True, slots=True)
class Unread:
    """A weight that is read when transformers takes all of it, as it does with a slice of a safetensors file."""

    files: WeightFiles
    name: str

    def __getitem__(self, all_of_it: EllipsisType) -> torch.Tensor:
        return self.files.numbers(self.name)


def from_pretrained(config: PreTrainedConfig, files: WeightFiles) -> Callable[..., Any]:
    """``from_pretrained`` with the numbers of all weights in ``files``, which must stay open meanwhile.

    transformers renames, joins and splits them; each is expanded when its turn comes.
    """
    # The class itself, since AutoModelForCausalLM always looks for a folder.
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return partial(kind.from_pretrained, None, config=config, state_dict={name: Unread(files, name) for name in files.names})


def without_quantisation(config: PreTrainedConfig) -> PreTrainedConfig:
    """``config``, changed to that of the model that quantised weights stand for: transformers would expand them itself."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config
