"""Checks by their headers that a model's weight files are complete, without torch and without reading a weight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.model_files.folder import LFS, one_line, read_json, reading
from services.model_files.weights.described import BLOCKS, FLOATS, WHOLE, Tensor
from services.model_files.weights.quantised.method import format_of, in_numbers
from services.model_files.weights.shared import read_shared
from speculation.errors import ConfigurationError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Weights unpacked from a GGUF file, beside configuration and tokeniser. In its metadata, ``kinds`` is a JSON object
# with the GGUF type and the number of inputs of every weight that is kept in blocks.
BLOCKS_FILE = "blocks.safetensors"

# Longest header that the safetensors library accepts.
_MOST_HEADER = 100_000_000
_COMPUTED = ("position_ids", "token_type_ids", "attn.bias", "attention.bias", "masked_bias", "num_batches_tracked")
_LAYER = re.compile(r"^(?:(?:model|transformer|decoder|language_model|text_model)\.)*(?:layers|h|blocks)\.(\d+)\.")
_BIN = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model.pt", "consolidated.00.pth", "tf_model.h5")


def layer_of(name: str) -> int | None:
    """The layer that a weight belongs to by its name; None: no layer."""
    found = _LAYER.match(name)
    return None if found is None else int(found[1])


def check_weights(folder: Path, config: Mapping[str, Any], target: Path | None = None) -> dict[str, Tensor]:
    """Check that all weights are there.

    Args:
        config: the model's ``config.json``.
        target: folder of the model that has the weights which ``folder`` shares with its target, if it shares any.

    Returns:
        All tensors by name.

    Raises:
        ConfigurationError: a file is missing, cut off or no safetensors file, or a layer is missing; names it.
    """
    if (folder / "adapter_config.json").is_file():
        raise ConfigurationError(
            f"cannot load the model at {folder}: there is an adapter (adapter_config.json): serve its base model, "
            "and name the adapter in verifier.lora_modules",
            about=folder,
        )
    found = _checked_tensors(folder)
    if target is not None and (shared := read_shared(folder)) is not None:
        others = _checked_tensors(target)
        found |= {name: others[theirs] for name, theirs in shared.names(found, others).items()}
    _check_layers(folder, found, config)
    return found


def _checked_tensors(folder: Path) -> dict[str, Tensor]:
    blocks = folder / BLOCKS_FILE
    if blocks.is_file():
        found = read_header(blocks)
    else:
        found = {}
        for file, expected in weight_files(folder).items():
            tensors = read_header(file)
            if (name := next((name for name in expected if name not in tensors), None)) is not None:
                raise ConfigurationError(
                    f"cannot load the model at {folder}: {file.name} holds no {name}, which {INDEX} says is there",
                    about=folder,
                )
            found.update(tensors)
        found = _in_numbers(folder, found)
        _check_types(folder, found)
    if not found:
        raise ConfigurationError(f"cannot load the model at {folder}: its files hold no weights", about=folder)
    return found


def _in_numbers(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the float model, where those in the files are quantised."""
    stored = format_of(folder)
    if stored is None:
        return tensors
    with reading(f"load the model at {folder}", about=folder):
        return in_numbers(tensors, stored.find(tensors))


def weight_files(folder: Path) -> dict[Path, frozenset[str]]:
    """The safetensors files of a model, each with the weights that the index assigns to it (none without an index).

    Raises:
        ConfigurationError: files are missing, or the index is malformed.
    """
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: frozenset()}
    if not (folder / INDEX).is_file():
        raise ConfigurationError(f"cannot load the model at {folder}: no {SINGLE} there{_instead(folder)}", about=folder)
    places = read_json(folder / INDEX).get("weight_map")
    where = f"cannot load the model at {folder}: {INDEX}"
    if not isinstance(places, dict) or not places:
        raise ConfigurationError(f"{where} has no weight_map, an object from weights to files", about=folder / INDEX)
    by_file: dict[Path, set[str]] = {}
    for name, file in places.items():
        # Only names of files in this folder: another path could lead anywhere.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigurationError(
                f"{where} has {name} in {str(file)[:80]!r}: must be a safetensors file beside it", about=folder / INDEX
            )
        by_file.setdefault(folder / file, set()).add(name)
    missing = sorted(file.name for file in by_file if not file.is_file())
    if missing:
        others = f", and {len(missing) - 1} more of {len(by_file)} files" if len(missing) > 1 else ""
        raise ConfigurationError(f"cannot load the model at {folder}: {missing[0]} is missing{others}", about=folder)
    return {file: frozenset(by_file[file]) for file in sorted(by_file)}


def _instead(folder: Path) -> str:
    """What the folder holds instead, with advice on how to use it."""
    if pickled := next((name for name in _BIN if (folder / name).is_file()), None):
        return (
            f", but {pickled}, which is never opened, since it can hold programs: convert it to safetensors "
            "(load it with transformers where you trust it, and call save_pretrained)"
        )
    if gguf := next((file.name for file in sorted(folder.glob("*.gguf")) if file.is_file()), None):
        return f"; to serve {gguf}, name that file"
    if other := next((file.name for file in sorted(folder.glob("*.safetensors")) if file.is_file()), None):
        return f", but {other}: files that belong together need {INDEX}"
    return ""


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors in the header of a safetensors file (eight bytes of length, then JSON), by name.

    Raises:
        ConfigurationError: the header is malformed, or the file has another size than it says.
    """
    header, length, size = _read(file)
    damaged = _damaged(file)
    tensors, ends = {}, []
    for name, entry in header.items():
        if name != "__metadata__":
            tensor, begin, end = _tensor(entry, f"{damaged}: {name[:80]}")
            tensors[name] = replace(tensor, file=file, begin=8 + length + begin)
            ends.append((begin, end, name))
    end = _check_places(ends, damaged)
    expected = 8 + length + end
    if size < expected:
        raise ConfigurationError(
            f"{file} has {size:,} bytes instead of {expected:,}: it is cut off; fetch it again", about=file
        )
    if size > expected:
        raise ConfigurationError(
            f"{file} has {size:,} bytes instead of {expected:,}: it is damaged; fetch it again", about=file
        )
    return tensors


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights in ``folder`` by name; of quantised ones, those of the numbers that they stand for.

    Raises:
        ConfigurationError: as ``weight_files`` and ``read_header``; or blocks do not say what they are.
    """
    blocks = folder / BLOCKS_FILE
    if not blocks.is_file():
        found = {name: tensor for file in weight_files(folder) for name, tensor in read_header(file).items()}
        return {name: tensor.shape for name, tensor in _in_numbers(folder, found).items()}
    shapes = {name: tensor.shape for name, tensor in read_header(blocks).items()}
    try:
        inputs = {name: int(size) for name, (_, size) in json.loads(_read(blocks)[0]["__metadata__"]["kinds"]).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{blocks} does not say of which types its blocks are", about=blocks) from error
    return {name: (*shape[:-1], inputs[name]) if name in inputs else shape for name, shape in shapes.items()}


def _damaged(file: Path) -> str:
    return f"{file} is no safetensors file, or is cut off in its header"


def _read(file: Path) -> tuple[dict[str, Any], int, int]:
    """A header, its length in bytes, and that of the whole file."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            length = int.from_bytes(start, "little")
            if start and LFS.startswith(start):
                raise ConfigurationError(
                    f"{file} is a pointer of git-lfs, not the weights: fetch them with `git lfs pull` in its folder",
                    about=file,
                )
            if len(start) < 8 or length > _MOST_HEADER:
                raise ConfigurationError(f"{file} is no safetensors file" + ("" if start else ": it is empty"), about=file)
            text = opened.read(length)
        size = file.stat().st_size
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read ({error.strerror or one_line(error)})", about=file) from error
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(_damaged(file), about=file) from error
    if not isinstance(header, dict):
        raise ConfigurationError(_damaged(file), about=file)
    return header, length, size


def _tensor(entry: Any, damaged: str) -> tuple[Tensor, int, int]:
    """A tensor from its entry in the header, and where its bytes begin and end."""
    fields: Any = [entry.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(entry, dict) else [None] * 3
    dtype, shape, places = fields
    numbers = [*shape, *places] if isinstance(shape, list) and isinstance(places, list) and len(places) == 2 else [-1]
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in numbers):
        raise ConfigurationError(f"{damaged} has no dtype, shape and data_offsets")
    tensor = Tensor(dtype=dtype, shape=tuple(shape))
    known = dtype in FLOATS or dtype in WHOLE
    if known and tensor.numbers * tensor.bytes_each != places[1] - places[0]:
        raise ConfigurationError(f"{damaged} is {dtype} {shape}, which are not {places[1] - places[0]} bytes")
    return tensor, places[0], places[1]


def _check_places(places: Iterable[tuple[int, int, str]], damaged: str) -> int:
    """Check that the tensors follow one another without gaps; returns where the last one ends."""
    at = 0
    for begin, end, name in sorted(places):
        if begin != at or end < begin:
            raise ConfigurationError(f"{damaged}: {name[:80]} does not begin where the one before it ends")
        at = end
    return at


def _check_types(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (*FLOATS, *BLOCKS) and not name.endswith(_COMPUTED):
            raise ConfigurationError(
                f"cannot load the model at {folder}: {name} is stored as {tensor.dtype}: {', '.join(FLOATS)} are read, "
                "and what quantization_config in config.json describes",
                about=folder,
            )


def _check_layers(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Check that every layer has at least one weight. The exact list is known only when the model is built."""
    there = {number for name in tensors if (number := layer_of(name)) is not None}
    count = next(_layer_counts(config), None)
    if not there or count is None or there.issuperset(range(min(count, len(there) + 1))):
        return
    first = next(number for number in range(count) if number not in there)
    raise ConfigurationError(
        f"cannot load the model at {folder}: its files hold nothing of layer {first}; {len(there)} layers are there, "
        f"config.json says {count}",
        about=folder,
    )


def _layer_counts(config: Mapping[str, Any]) -> Iterator[int]:
    text = config.get("text_config")
    for part in (text, config):
        if isinstance(part, Mapping):
            for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
                if type(value := part.get(name)) is int:
                    yield value
