"""A model folder's weights by name, from published safetensors or from ``blocks.safetensors``, unpacked from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.model_folder import reading
from services.weights.headers import BLOCKS_FILE, read_header, weight_files
from services.weights.stored_blocks import KEPT, StoredBlocks, Weight, bytes_of_row


class WeightFiles:
    """The open weight files of a folder, for a ``with`` block.

    Raises:
        ConfigurationError: a file is missing or damaged; names it.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._read: dict[str, Weight] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        try:
            with reading(f"load the model at {folder}"):
                self._files = self._find(folder)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def paths(self) -> set[Path]:
        """Paths of all files."""
        return set(self._files.values())

    @property
    def names(self) -> Set[str]:
        """Names of all weights."""
        return self._files.keys()

    def get(self, name: str) -> Weight:
        """A weight as stored; the same object at every call."""
        if name not in self._read:
            tensor: torch.Tensor = self._open(self._files[name]).get_tensor(name)
            kind = self._kinds.get(name)
            self._read[name] = tensor if kind is None else StoredBlocks(tensor, *kind)
        return self._read[name]

    def _find(self, folder: Path) -> Mapping[str, Path]:
        if (folder / BLOCKS_FILE).is_file():
            self._kinds = self._read_kinds(folder / BLOCKS_FILE)
            return dict.fromkeys(self._open(folder / BLOCKS_FILE).keys(), folder / BLOCKS_FILE)
        return {name: file for file in weight_files(folder) for name in self._open(file).keys()}  # noqa: SIM118

    def _read_kinds(self, file: Path) -> dict[str, tuple[str, int]]:
        """Type and number of inputs of each weight that is kept in blocks."""
        tensors = read_header(file)
        kinds = json.loads((self._open(file).metadata() or {}).get("kinds", "null"))
        if not isinstance(kinds, dict):
            raise ValueError(f"{BLOCKS_FILE} does not say of which types its blocks are")
        unknown = {str(entry[0]) for entry in kinds.values()} - set(KEPT)
        if unknown:
            raise ValueError(f"{BLOCKS_FILE} has blocks of the type {', '.join(sorted(unknown))}")
        for name, tensor in tensors.items():
            if (tensor.dtype == "U8") != (name in kinds):
                raise ValueError(f"{BLOCKS_FILE}: {name} is {tensor.dtype}, its type among the kinds is {kinds.get(name)}")
        found = {name: (str(kind), int(size)) for name, (kind, size) in kinds.items()}
        for name, (kind, size) in found.items():
            shape = tensors[name].shape
            if len(shape) != 2 or shape[1] != bytes_of_row(kind, size):
                raise ValueError(f"{BLOCKS_FILE}: {name} is {shape}, which are no rows of {size} numbers in {kind}")
        return found

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._opened[path]


def save_blocks(weights: Mapping[str, Weight], folder: Path) -> None:
    """Write ``blocks.safetensors``."""
    kinds = {name: (weight.kind, weight.in_features) for name, weight in weights.items() if isinstance(weight, StoredBlocks)}
    tensors = {name: weight.raw if isinstance(weight, StoredBlocks) else weight for name, weight in weights.items()}
    save_file(tensors, folder / BLOCKS_FILE, metadata={"kinds": json.dumps(kinds)})
