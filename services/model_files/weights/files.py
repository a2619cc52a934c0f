"""A model folder's weights by name, from published safetensors or from ``blocks.safetensors``, unpacked from a GGUF file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.model_files.folder import reading
from services.model_files.weights.headers import BLOCKS_FILE, SINGLE, read_header, weight_files
from services.model_files.weights.noted_reads import StoredPiece, noted_here
from services.model_files.weights.quantised.method import format_of
from services.model_files.weights.quantised.packed import Packed
from services.model_files.weights.rounded_inputs import InputRounding
from services.model_files.weights.shared import read_shared
from services.model_files.weights.stacked_blocks import AnyWeight, StackedBlocks, any_numbers
from services.model_files.weights.stored_blocks import (
    BLOCK,
    KEPT,
    TABLES,
    StoredBlocks,
    alike,
    bytes_of_row,
    joined,
    quantized,
    stored_as,
)
from speculation.errors import ConfigurationError


class WeightFiles:
    """The open weight files of a folder, for a ``with`` block.

    Args:
        target: folder of the model that has the weights which ``folder`` shares with its target, if it shares any; None: the
            folder's own weights alone.

    Raises:
        ConfigurationError: a file is missing or damaged, or what is shared is not in the target's files; names it.
    """

    def __init__(self, folder: Path, target: Path | None = None) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._noting = noted_here()
        self._read: dict[str, AnyWeight] = {}
        self._kinds: dict[str, tuple[str, int]] = {}
        # Of those of them whose inputs lie in another order.
        self._orders: dict[str, torch.Tensor] = {}
        self._files: Mapping[str, Path] = {}
        # Weights that are stored as codes and scales.
        self._packed: dict[str, Packed] = {}
        # Names of shared weights in the target's files.
        self._shared: Mapping[str, str] = {}
        try:
            with reading(f"load the model at {folder}", about=folder):
                self._files = self._find(folder)
            if target is not None and (shared := read_shared(folder)) is not None:
                self._target = self._stack.enter_context(WeightFiles(target))
                self._shared = shared.names(self._files, self._target.names)
            parts = {name for packed in self._packed.values() for name in packed.parts.values()}
            self._names = (self._files.keys() - parts) | self._packed.keys() | self._shared.keys()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def paths(self) -> set[Path]:
        """Paths of the folder's own files."""
        return set(self._files.values())

    @property
    def names(self) -> Set[str]:
        """Names of all weights; of quantised ones, those that they have in the float model."""
        return self._names

    def get(self, name: str) -> AnyWeight:
        """A weight as stored, the same object at every call; a quantised one as the numbers that it stands for, made anew.

        Raises:
            ConfigurationError: a quantised weight's tensors stand for no numbers; names the tensor.
        """
        if name in self._shared:
            return self._target.get(self._shared[name])
        if name in self._packed:
            with reading(f"load the model at {self._folder}", about=self._folder):
                return self._packed[name].weight(self._stored)
        if name not in self._read:
            self._read[name] = self._as_kept(name, self._stored(name))
        return self._read[name]

    def _as_kept(self, name: str, tensor: torch.Tensor) -> AnyWeight:
        kind = self._kinds.get(name)
        return tensor if kind is None else _in_blocks(tensor, *kind, self._orders.get(name))

    def _stored(self, name: str) -> torch.Tensor:
        return self.stored(StoredPiece(name))

    def stored(self, piece: StoredPiece) -> torch.Tensor:
        """A piece of one of the folder's own tensors, as it is in its file."""
        opened, read = self._open(self._files[piece.name]), slice(piece.begin, piece.end)
        found: torch.Tensor = (
            opened.get_tensor(piece.name)
            if piece.end < 0
            else opened.get_slice(piece.name)[(*(slice(None),) * piece.axis, read)]
        )
        if self._noting is not None:
            self._noting.note(piece, found)
        return found

    def file_of(self, name: str) -> Path:
        """The file that one of the folder's own tensors is in."""
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight, as numbers."""
        if name in self._shared:
            return self._target.shape(self._shared[name])
        if name in self._packed:
            return self._packed[name].shape
        found = tuple(self._open(self._files[name]).get_slice(name).get_shape())
        return found if name not in self._kinds else (*found[:-1], self._kinds[name][1])

    def kind(self, name: str) -> str:
        """The type of a weight in the files, by safetensors' or GGUF's name; of a quantised one, that of its numbers."""
        if name in self._shared:
            return self._target.kind(self._shared[name])
        if name in self._packed:
            return self._packed[name].dtype
        if name in self._kinds:
            return self._kinds[name][0]
        return str(self._open(self._files[name]).get_slice(name).get_dtype())

    def part(self, name: str, begin: int, end: int) -> AnyWeight:
        """The rows from ``begin`` to before ``end`` of a weight as stored; no other one is read, unless it is quantised."""
        if name in self._shared:
            return self._target.part(self._shared[name], begin, end)
        if name in self._packed:
            whole = self.get(name)
            if isinstance(whole, StackedBlocks):
                return whole.experts(begin, end)
            return whole.rows(begin, end) if isinstance(whole, StoredBlocks) else whole[begin:end]
        return self._as_kept(name, self.stored(StoredPiece(name, 0, begin, end)))

    def parts(self, name: str, axis: int, ranges: Sequence[range]) -> AnyWeight:
        """The numbers in these ranges of one dimension, one after the other; otherwise as ``part``.

        Raises:
            ValueError: a matrix is kept in blocks, of which there are parts of rows alone.
        """
        if axis == 0 and len(ranges) == 1:
            return self.part(name, ranges[0].start, ranges[0].stop)
        if name in self._shared:
            return self._target.parts(self._shared[name], axis, ranges)
        whole = self.get(name) if name in self._packed or name in self._kinds else None
        if isinstance(whole, StackedBlocks):
            if axis == whole.outputs_axis:
                return whole.outputs(ranges)
            whole = whole.numbers()
        if isinstance(whole, StoredBlocks):
            if axis != 0:
                raise ValueError(f"{name} is kept in blocks, of which other parts than rows are not read")
            return joined([whole.rows(one.start, one.stop) for one in ranges])
        if whole is None:
            return torch.cat([self.stored(StoredPiece(name, axis, one.start, one.stop)) for one in ranges], axis)
        return torch.cat([whole.narrow(axis, one.start, len(one)) for one in ranges], axis)

    def numbers(self, name: str) -> torch.Tensor:
        """A weight as stored, blocks as the float32 numbers that they stand for."""
        return any_numbers(self.get(name))

    @property
    def roundings(self) -> dict[str, InputRounding]:
        """Of the linear layers that round what enters them, by name.

        Raises:
            ConfigurationError: a stored scale is none; names it.
        """
        with reading(f"load the model at {self._folder}", about=self._folder):
            found = {name: packed.rounding(self._stored) for name, packed in self._packed.items()}
        return {name.removesuffix(".weight"): one for name, one in found.items() if one is not None}

    @property
    def reordered(self) -> bool:
        """Whether blocks have their inputs in another order than numbers, since those of a group lie apart (act-order)."""
        named = (packed.parts["groups"] for packed in self._packed.values() if "groups" in packed.parts)
        return bool(self._orders) or any(bool((self._stored(name).diff() < 0).any()) for name in named)

    def digest(self, names: Iterable[str]) -> str:
        """SHA-256 over weights as they are stored: names, types, shapes and bytes, in the order of the names."""
        found = hashlib.sha256()
        for name in sorted(names):
            weight = self.get(name)
            for one in weight.matrices if isinstance(weight, StackedBlocks) else (weight,):
                content = one.raw if isinstance(one, StoredBlocks) else one.contiguous()
                found.update(f"{name} {stored_as(one)} {list(one.shape)}\n".encode())
                found.update(content.flatten().view(torch.uint8).numpy().data)
                if isinstance(one, StoredBlocks) and one.order is not None:
                    found.update(one.order.numpy().data)
        return found.hexdigest()

    def _find(self, folder: Path) -> Mapping[str, Path]:
        if (folder / BLOCKS_FILE).is_file():
            self._kinds = self._read_kinds(folder / BLOCKS_FILE)
            return dict.fromkeys(self._open(folder / BLOCKS_FILE).keys(), folder / BLOCKS_FILE)
        files = weight_files(folder)
        if (stored := format_of(folder)) is not None:
            tensors = {name: tensor for file in files for name, tensor in read_header(file).items()}
            self._packed = {packed.name: packed for packed in stored.find(tensors)}
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118

    def _read_kinds(self, file: Path) -> dict[str, tuple[str, int]]:
        """Type and number of inputs of each weight that is kept in blocks."""
        tensors = read_header(file)
        metadata = self._open(file).metadata() or {}
        kinds = json.loads(metadata.get("kinds", "null"))
        if not isinstance(kinds, dict):
            raise ValueError(f"{BLOCKS_FILE} does not say of which types its blocks are")
        unknown = {str(entry[0]) for entry in kinds.values()} - {*KEPT, *TABLES}
        if unknown:
            raise ValueError(f"{BLOCKS_FILE} has blocks of the type {', '.join(sorted(unknown))}")
        for name, tensor in tensors.items():
            if (tensor.dtype == "U8") != (name in kinds):
                raise ValueError(f"{BLOCKS_FILE}: {name} is {tensor.dtype}, its type among the kinds is {kinds.get(name)}")
        found = {name: (str(kind), int(size)) for name, (kind, size) in kinds.items()}
        for name, (kind, size) in found.items():
            shape = tensors[name].shape
            if len(shape) not in (2, 3) or shape[-1] != bytes_of_row(kind, size):
                raise ValueError(f"{BLOCKS_FILE}: {name} is {shape}, which are no rows of {size} numbers in {kind}")
        for name, order in json.loads(metadata.get("orders", "{}")).items():
            self._orders[name] = torch.tensor(order)
            if sorted(order) != list(range(found[name][1])):
                raise ValueError(f"{BLOCKS_FILE}: the order of the inputs of {name} is none of {found[name][1]} numbers")
        return found

    def _open(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._opened[path]


def is_whole_float(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds floating-point numbers of two bytes and more. Smaller ones are codes: each format has its own
    scales beside them, and torch computes next to nothing with them."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def check_shared(folder: Path, target: Path) -> None:
    """Check the weights that the model in ``folder`` shares against this target's.

    Raises:
        ConfigurationError: it was made for another target.
    """
    shared = read_shared(folder)
    if shared is None:
        return
    with WeightFiles(target) as files:
        found = files.digest(shared.names((), files.names).values())
    if found != shared.sha256:
        raise ConfigurationError(
            f"{folder} was made for another target: the weights that it shares have the checksum {shared.sha256[:12]}, "
            f"those of {target} {found[:12]}",
            about=folder,
        )


def quantize_folder(folder: Path) -> None:
    """Replace model.safetensors by blocks.safetensors: matrices in Q8_0, eight and a half bits for each number.

    What has no whole blocks of inputs, or is no matrix of floats, stays as it is.

    Raises:
        OSError: the file cannot be written; the old one stays.
    """
    held: dict[str, AnyWeight] = {}
    with WeightFiles(folder) as files:
        for name in files.names:
            weight = files.get(name)
            if isinstance(weight, torch.Tensor) and _takes_blocks(weight):
                weight = quantized(weight)
            held[name] = weight
    save_blocks(held, folder)
    (folder / SINGLE).unlink()


def _takes_blocks(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.is_floating_point() and weight.shape[1] % BLOCK == 0


def save_blocks(weights: Mapping[str, AnyWeight], folder: Path) -> None:
    """Write ``blocks.safetensors``. Experts' matrices are in blocks of one type, or are written as numbers."""
    kinds: dict[str, tuple[str, int]] = {}
    orders: dict[str, list[int]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        blocks = _of_one_kind(weight)
        if blocks:
            kinds[name] = blocks[0].kind, blocks[0].in_features
            if blocks[0].order is not None:
                orders[name] = blocks[0].order.tolist()
            tensors[name] = blocks[0].raw if len(weight.shape) == 2 else torch.stack([one.raw for one in blocks])
        else:
            tensors[name] = any_numbers(weight)
    save_file(tensors, folder / BLOCKS_FILE, metadata={"kinds": json.dumps(kinds), "orders": json.dumps(orders)})


def _of_one_kind(weight: AnyWeight) -> list[StoredBlocks]:
    """The matrix, or those of experts, that a tensor of bytes holds; empty: it would not."""
    if isinstance(weight, torch.Tensor) or (isinstance(weight, StackedBlocks) and weight.inputs_first):
        return []
    matrices = weight.matrices if isinstance(weight, StackedBlocks) else (weight,)
    blocks = [one for one in matrices if isinstance(one, StoredBlocks)]
    return blocks if len(blocks) == len(matrices) and alike(blocks) else []


def _in_blocks(raw: torch.Tensor, kind: str, inputs: int, order: torch.Tensor | None = None) -> StoredBlocks | StackedBlocks:
    """A matrix, [outputs, bytes], or those of experts, [experts, outputs, bytes]."""
    if raw.dim() == 2:
        return StoredBlocks(raw, kind, inputs, order)
    return StackedBlocks(tuple(StoredBlocks(one, kind, inputs, order) for one in raw))
