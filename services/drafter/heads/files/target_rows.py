"""The target's embedding and output rows, which heads share: read from its folder by name, whole or by id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from services.drafter.heads.files.head_config import TargetShape
from services.drafter.heads.files.target_shape import read_target_shape as read_target_shape
from services.model_files.folder import reading
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.stacked_blocks import StackedBlocks
from services.model_files.weights.stored_blocks import StoredBlocks, Weight, numbers_of
from speculation.errors import ConfigurationError

# How models call the two matrices; prefixes differ.
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "token_embd", "embeddings")
_OUTPUTS = ("lm_head", "embed_out", "output", "lm_head.linear")


class RowTable:
    """A matrix [V, h] of which rows are read by id.

    Args:
        weight: as stored.
        whole: keep all rows on the device, converted. Otherwise only the rows asked for are converted, at every call.
    """

    def __init__(self, weight: Weight, device: str | torch.device, dtype: torch.dtype, *, whole: bool) -> None:
        self._device, self._dtype = torch.device(device), dtype
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self._stored: Weight = weight
        self._whole: torch.Tensor | None = None
        if whole:
            self._whole = numbers_of(weight).to(self._device, dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """[..., h], the rows of ``ids`` [...]."""
        if self._whole is not None:
            return torch.nn.functional.embedding(ids.to(self._device), self._whole)
        at, stored = ids.to("cpu"), self._stored
        if isinstance(stored, StoredBlocks):
            found = replace(stored, raw=stored.raw[at.flatten()]).float()
            found = found.reshape(*at.shape, self.shape[1])
        else:
            found = stored[at]
        return found.to(self._device, self._dtype)

    def all(self) -> torch.Tensor:
        """[V, h], all rows; those that are kept, if they are."""
        return self.rows(torch.arange(self.shape[0])) if self._whole is None else self._whole


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRows:
    """What heads share with their target.

    Attributes:
        embedding: [V, h_t].
        output: [V, h_t]; the embedding itself, if the target's two are tied.
        bias: [V], of the target's output layer, or None.
        scale, softcap: what the target does to its logits: logits * scale, then softcap * tanh(logits / softcap).
    """

    embedding: RowTable
    output: RowTable
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, embedding: torch.Tensor, output: torch.Tensor | None = None) -> TargetRows:
        """From matrices [V, h] in memory; tied, if only one is given."""
        tables = [RowTable(each, each.device, each.dtype, whole=True) for each in (embedding, output) if each is not None]
        return cls(embedding=tables[0], output=tables[-1])

    def shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` as the target's own output layer would give them."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def read_target_rows(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    whole: bool | None = None,
) -> TargetRows:
    """The rows of the target in ``folder``: published safetensors, or unpacked GGUF blocks.

    Args:
        whole: keep all rows on the device, as training wants it; if None, a GPU does, and a CPU converts rows by id.

    Raises:
        ConfigurationError: they are not found; names what is there.
    """
    whole = torch.device(device).type != "cpu" if whole is None else whole
    shape = read_target_shape(folder)
    with reading(f"read the target's rows at {folder}", about=folder), WeightFiles(folder) as files:
        embedding = _find(files, shape, _EMBEDDINGS)
        if embedding is None:
            raise ConfigurationError(
                f"cannot read the target's rows at {folder}: no embedding [{shape.vocab_size}, {shape.hidden_size}] among "
                f"its weights; looked for {', '.join(_EMBEDDINGS)}",
                about=folder,
            )
        output = None if shape.config.get("tie_word_embeddings") is True else _find(files, shape, _OUTPUTS)
        table = RowTable(_matrix(files, embedding), device, dtype, whole=whole)
        bias_name = None if output is None else output.removesuffix("weight") + "bias"
        bias = files.get(bias_name) if bias_name is not None and bias_name in files else None
        return TargetRows(
            embedding=table,
            output=table if output is None else RowTable(_matrix(files, output), device, dtype, whole=whole),
            bias=bias.to(device, dtype) if isinstance(bias, torch.Tensor) else None,
            scale=_scale(shape.config),
            softcap=_softcap(shape.config),
        )


def _matrix(files: WeightFiles, name: str) -> Weight:
    found = files.get(name)
    # It was found by its shape.
    assert not isinstance(found, StackedBlocks)
    return found


def _find(files: WeightFiles, shape: TargetShape, names: Sequence[str]) -> str | None:
    """The weight of one of these names that has the size of the vocabulary; the least nested one, if there are several."""
    found = [
        name
        for name in files.names
        if any(name == f"{each}.weight" or name.endswith(f".{each}.weight") for each in names)
        and tuple(files.get(name).shape) == (shape.vocab_size, shape.hidden_size)
    ]
    return min(found, key=len, default=None)


def _scale(config: Mapping[str, Any]) -> float:
    """Cohere multiplies its logits, Granite divides them."""
    return float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)


def _softcap(config: Mapping[str, Any]) -> float | None:
    cap = config.get("final_logit_softcapping")
    return float(cap) if cap else None
