"""A model folder's weights by name: safetensors as they are published, or ``blocks.safetensors``, made of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from services.verifier.stored_blocks import KEPT, StoredBlocks, Weight
from speculation.errors import ConfigurationError

# Beside it lie configuration and tokeniser, as in any folder. In its metadata, ``kinds`` is a JSON object: the GGUF type and
# the inputs of every weight that is kept in blocks.
BLOCKS_FILE = "blocks.safetensors"
# It shares the embeddings' weights in many models; their files need none of its own then.
OUTPUT_LAYER = "lm_head.weight"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The open files of a folder, for a ``with`` block.

    Raises:
        ConfigurationError: there are none, or they are damaged; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._read: dict[str, Weight] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        try:
            self._files = self._find(folder)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._stack.close()
            raise ConfigurationError(f"cannot load the model at {folder}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def paths(self) -> set[Path]:
        """Of all files."""
        return set(self._files.values())

    def get(self, name: str) -> Weight:
        """A weight as it is stored; the same object each time."""
        if name not in self._read:
            tensor: torch.Tensor = self._open(self._files[name]).get_tensor(name)
            kind = self._kinds.get(name)
            self._read[name] = tensor if kind is None else StoredBlocks(tensor, *kind)
        return self._read[name]

    def _find(self, folder: Path) -> Mapping[str, Path]:
        if (folder / BLOCKS_FILE).is_file():
            file = self._open(folder / BLOCKS_FILE)
            self._kinds = {
                name: (str(kind), int(size)) for name, (kind, size) in json.loads(file.metadata()["kinds"]).items()
            }
            unknown = {kind for kind, _ in self._kinds.values()} - set(KEPT)
            if unknown:
                raise ValueError(f"{BLOCKS_FILE} has blocks of the type {', '.join(sorted(unknown))}")
            return dict.fromkeys(file.keys(), folder / BLOCKS_FILE)
        if (folder / _INDEX).is_file():
            names: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
            return {name: folder / file for name, file in names.items()}
        if not (folder / _SINGLE).is_file():
            raise ValueError(f"no {_SINGLE} there")
        return dict.fromkeys(self._open(folder / _SINGLE).keys(), folder / _SINGLE)

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._opened[path]


def save_blocks(weights: Mapping[str, Weight], folder: Path) -> None:
    """Write ``blocks.safetensors``."""
    kinds = {name: (weight.kind, weight.in_features) for name, weight in weights.items() if isinstance(weight, StoredBlocks)}
    tensors = {name: weight.raw if isinstance(weight, StoredBlocks) else weight for name, weight in weights.items()}
    save_file(tensors, folder / BLOCKS_FILE, metadata={"kinds": json.dumps(kinds)})
