"""Reads the header of a GGUF file without numpy, torch or a weight: enough to refuse what cannot be unpacked.

The format: magic, version, number of tensors, number of fields; the fields, each a key, a type and a value; the tensors,
each a name, dimensions, a type and an offset; the data (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from services.model_files.folder import LFS, reading
from services.model_files.known_types import known_gguf_architectures, transformers_version

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Bytes of a field's value by its type number.
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_TEXT, _LIST = 8, 9
_ARCHITECTURE = b"general.architecture"
_ALIGNMENT = b"general.alignment"
# (numbers per block, bytes per block) by a tensor's type number; equals GGML_QUANT_SIZES of the gguf package.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74),
    18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2),
    26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
_MOST_DIMENSIONS = 4
# Field of files that each hold a part of the model.
_SPLIT = b"split.count"
_LAYERS = b".block_count"
_LAYER = re.compile(rb"^blk\.(\d+)\.")


def check(path: Path) -> str:
    """Check that a file is a complete GGUF file of an architecture that transformers reads.

    Returns:
        Its architecture.

    Raises:
        ConfigurationError: it is not; says what is wrong.
    """
    with reading(f"unpack {path}", about=path), path.open("rb") as file:
        start = file.read(len(LFS))
        if start == LFS:
            raise ValueError("it is a pointer of git-lfs, not the model: fetch it with `git lfs pull` in its folder")
        if start[:4] != _MAGIC:
            raise ValueError("it is no GGUF file" + ("" if start else ", but empty"))
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return _check(data)


def _check(data: mmap) -> str:
    try:
        header = _read(data)
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError("it is cut off in its header, or is damaged; fetch it again") from error
    if header.parts > 1:
        raise ValueError(f"it is one of {header.parts} files of a model: join them with llama.cpp's gguf-split --merge")
    if len(data) < header.end:
        raise ValueError(f"it has {len(data):,} bytes instead of {header.end:,}: it is cut off; fetch it again")
    known = known_gguf_architectures()
    if known and _plain(header.architecture) not in {_plain(name) for name in known}:
        raise ValueError(
            f"its architecture is {header.architecture[:40]!r}, which {transformers_version()} does not read from GGUF: use "
            "the model's safetensors"
        )
    return header.architecture


def _plain(name: str) -> str:
    """llama.cpp and transformers use different dashes in names."""
    return name.replace("-", "").replace("_", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """``end`` is where the last tensor's data ends; ``parts`` is the number of files of the model."""

    architecture: str
    parts: int
    end: int


class _Reader:
    """Reads values one after the other; ``struct.error`` or ``IndexError`` at the end of the file."""

    def __init__(self, data: mmap, at: int) -> None:
        self._data = data
        self.at = at

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self.at)
        self.skip(struct.calcsize(form))
        return int(value)

    def text(self) -> bytes:
        length, start = self.number("<Q"), self.at
        self.skip(length)
        return self._data[start : self.at]

    def skip(self, count: int) -> None:
        if count > len(self._data) - self.at:
            raise IndexError("beyond the end")
        self.at += count

    def skip_value(self, kind: int) -> None:
        if kind == _TEXT:
            self.skip(self.number("<Q"))
        elif kind == _LIST:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SCALARS:
                self.skip(count * _SCALARS[inner])
            elif inner == _TEXT:
                for _ in range(count):
                    self.skip(self.number("<Q"))
            else:
                raise ValueError(f"it is damaged: a list of values of the type {inner}")
        elif kind in _SCALARS:
            self.skip(_SCALARS[kind])
        else:
            raise ValueError(f"it is damaged: a value of the type {kind}")


def _read(data: mmap) -> _Header:
    version, tensors, fields = struct.unpack_from("<IQQ", data, len(_MAGIC))
    if version not in _VERSIONS:
        raise ValueError(f"it has version {version} of the format, {' and '.join(map(str, _VERSIONS))} are read")
    reader = _Reader(data, len(_MAGIC) + 20)
    architecture = ""
    numbers = {_ALIGNMENT: 32, _SPLIT: 1, _LAYERS: 0}
    for _ in range(fields):
        key, kind = reader.text(), reader.number("<I")
        known = _LAYERS if key.endswith(_LAYERS) else key
        if key == _ARCHITECTURE and kind == _TEXT:
            architecture = reader.text().decode("utf-8", "replace")
        elif known in numbers and kind in _NUMBERS:
            numbers[known] = reader.number(_NUMBERS[kind])
        else:
            reader.skip_value(kind)
    if not architecture:
        raise ValueError("it names no architecture")
    if numbers[_ALIGNMENT] < 1:
        raise ValueError(f"general.alignment is {numbers[_ALIGNMENT]}: must be a number from 1 on")
    # Read one by one, since a damaged count may exceed the file.
    names, ends = set(), [0]
    for _ in range(tensors):
        name, end = _tensor(reader)
        names.add(name)
        ends.append(end)
    if not names:
        raise ValueError("it holds no weights")
    layers = {int(found[1]) for name in names if (found := _LAYER.match(name))}
    if numbers[_SPLIT] == 1 and len(layers) < numbers[_LAYERS]:
        raise ValueError(f"it holds weights of {len(layers)} layers, and says it has {numbers[_LAYERS]} (block_count)")
    start = -(-reader.at // numbers[_ALIGNMENT]) * numbers[_ALIGNMENT]
    return _Header(architecture=architecture, parts=numbers[_SPLIT], end=start + max(ends))


def _tensor(reader: _Reader) -> tuple[bytes, int]:
    """The name of a tensor, and where its data ends, relative to the start of all data."""
    name, count = reader.text(), reader.number("<I")
    if not 1 <= count <= _MOST_DIMENSIONS:
        raise ValueError(f"it is damaged: tensor {name[:60].decode('utf-8', 'replace')!r} has {count} dimensions")
    sizes = [reader.number("<Q") for _ in range(count)]
    kind, offset = reader.number("<I"), reader.number("<Q")
    if kind not in _BLOCKS:
        raise ValueError(f"tensor {name[:60].decode('utf-8', 'replace')!r} is of the type {kind}, which is not known")
    block, block_bytes = _BLOCKS[kind]
    if sizes[0] % block:
        raise ValueError(
            f"it is damaged: tensor {name[:60].decode('utf-8', 'replace')!r} has rows of {sizes[0]} in blocks of {block}"
        )
    return name, offset + math.prod(sizes) // block * block_bytes
