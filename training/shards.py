"""Training data on disk: shards of sequences with the target's hidden states. ``data_manifest`` has their checksums.

A shard is a safetensors file; rows are the tokens of all its sequences, one after the other, prompt and answer:

=================  ========  ==================  ======================================================================
``tokens``         int32     [rows]
``states``         float16   [rows, width]       of each position; width = layers * hidden size
``known``          bool      [rows]              False where no state was computed: at every sequence's last token
``offsets``        int64     [sequences + 1]     where sequences begin, and the end of the last one
``prompt_lengths`` int32     [sequences]
``temperature``    float32   [sequences]         at which the target chose the answer; 1 of one that was given
``domain``         int16     [sequences]         index into the manifest's ``domains``
``held_out``       bool      [sequences]         whether it belongs to the validation split
=================  ========  ==================  ======================================================================

The state at position p of layer -1, times the target's output rows, gives the logits of the token at p + 1.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from speculation.errors import ConfigurationError
from speculation.files import write_whole
from training.data_manifest import DataManifest, ShardEntry, check_layers, read_data_manifest

REMAKE = "run outrider train data with the same options again: it makes this shard anew"
_TENSORS: dict[str, tuple[str, type[Any]]] = {
    "tokens": ("I32", np.int32),
    "states": ("F16", np.float16),
    "known": ("BOOL", np.bool_),
    "offsets": ("I64", np.int64),
    "prompt_lengths": ("I32", np.int32),
    "temperature": ("F32", np.float32),
    "domain": ("I16", np.int16),
    "held_out": ("BOOL", np.bool_),
}

Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """A prompt and the target's answer, or one that it has read.

    Attributes:
        tokens: int32 [rows].
        states: float16 [rows, width]; only those marked ``known``, bool [rows], have been computed.
        temperature: at which the answer was chosen.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    states: NDArray[np.float16]
    known: NDArray[np.bool_]
    domain: str
    temperature: float


def shard_name(number: int) -> str:
    """The file of a shard, counted from 0."""
    return f"shard-{number:05d}.safetensors"


def write_shard(
    folder: Path, number: int, sequences: Sequence[TrainingSequence], domains: Sequence[str], held_out: Sequence[bool]
) -> ShardEntry:
    """Write a shard whole.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    content = save(
        {
            "tokens": np.concatenate([sequence.tokens for sequence in sequences]),
            "states": np.concatenate([sequence.states for sequence in sequences]),
            "known": np.concatenate([sequence.known for sequence in sequences]),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
            "prompt_lengths": np.array([sequence.prompt_length for sequence in sequences], dtype=np.int32),
            "temperature": np.array([sequence.temperature for sequence in sequences], dtype=np.float32),
            "domain": np.array([domains.index(sequence.domain) for sequence in sequences], dtype=np.int16),
            "held_out": np.array(held_out, dtype=np.bool_),
        }
    )
    name = shard_name(number)
    write_whole(folder / name, content)
    return ShardEntry(
        file=name,
        sequences=len(sequences),
        rows=sum(lengths),
        answer_tokens=sum(len(sequence.tokens) - sequence.prompt_length for sequence in sequences),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def fault_of(folder: Path, entry: ShardEntry) -> str | None:
    """What is wrong with a shard's file, compared with the manifest; None if nothing is."""
    file = folder / entry.file
    try:
        size = file.stat().st_size
        if size != entry.size:
            return f"has {size} bytes instead of {entry.size}: cut off, or altered"
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest.hexdigest() == entry.sha256 else "has been altered: its checksum differs from the manifest's"


class Shards:
    """Sequences of a folder, memory-mapped; see ``read_shards``.

    While the data grow, a sequence keeps its index: shards behind one that is not there yet, or not full yet, are left out.
    """

    def __init__(
        self, folder: Path, manifest: DataManifest, split: Split | None, layers: tuple[int, ...] | None = None
    ) -> None:
        self.manifest = manifest
        self._columns = _columns(folder, manifest, manifest.layers if layers is None else layers)
        self._tensors = [_mapped(folder / entry.file, manifest.width) for entry in _without_gap(manifest)]
        self._places = [
            (shard, index)
            for shard, tensors in enumerate(self._tensors)
            for index in range(len(tensors["prompt_lengths"]))
            if split is None or bool(tensors["held_out"][index]) == (split == "validation")
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[TrainingSequence]:
        return (self.sequence(index) for index in range(len(self)))

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [int(np.diff(self._tensors[shard]["offsets"][at : at + 2])[0]) for shard, at in self._places]

    def sequence(self, index: int) -> TrainingSequence:
        """One sequence; its arrays are views of the file, read when they are used."""
        shard, at = self._places[index]
        tensors = self._tensors[shard]
        rows = slice(int(tensors["offsets"][at]), int(tensors["offsets"][at + 1]))
        states = tensors["states"][rows]
        return TrainingSequence(
            tokens=tensors["tokens"][rows],
            prompt_length=int(tensors["prompt_lengths"][at]),
            states=states if self._columns is None else states[:, self._columns],
            known=tensors["known"][rows],
            domain=self.manifest.domains[int(tensors["domain"][at])],
            temperature=float(tensors["temperature"][at]),
        )


def read_shards(
    folder: Path, split: Split | None = None, *, verify: bool = True, layers: tuple[int, ...] | None = None
) -> Shards:
    """Open a folder of training data.

    Args:
        split: None: both.
        verify: compare every shard's checksum with the manifest.
        layers: whose states the sequences have, in this order; None: all that the data hold.

    Raises:
        ConfigurationError: there is no data, a shard is damaged, or the data hold no states of a layer; names the file and
            what to do.
    """
    manifest = read_data_manifest(folder)
    if not manifest.shards:
        raise ConfigurationError(
            f"{folder} holds no shard yet: outrider train data writes the first after some minutes", about=folder
        )
    if verify:
        for entry in manifest.shards:
            if (fault := fault_of(folder, entry)) is not None:
                raise ConfigurationError(f"{folder / entry.file} {fault}; {REMAKE}", about=folder / entry.file)
    return Shards(folder, manifest, split, layers)


def _columns(folder: Path, manifest: DataManifest, layers: tuple[int, ...]) -> NDArray[np.int64] | None:
    """The columns of the states of ``layers``; None: all, as they are.

    Raises:
        ConfigurationError: as ``check_layers``.
    """
    if layers == manifest.layers:
        return None
    check_layers(str(folder), manifest.layers, layers)
    size = manifest.target.hidden_size
    first = np.array([manifest.layers.index(layer) * size for layer in layers], dtype=np.int64)
    return (first[:, None] + np.arange(size)).ravel()


def _without_gap(manifest: DataManifest) -> list[ShardEntry]:
    """The shards before the first one that is missing, and up to the first one that is not full."""
    found = []
    for number, entry in enumerate(manifest.shards):
        if entry.file != shard_name(number):
            break
        found.append(entry)
        if entry.sequences < manifest.sampling.shard_sequences:
            break
    return found


def _mapped(file: Path, width: int) -> dict[str, NDArray[Any]]:
    """The tensors of a shard, memory-mapped.

    Raises:
        ConfigurationError: it is no shard with states of this width.
    """
    try:
        with file.open("rb") as content:
            (length,) = struct.unpack("<Q", content.read(8))
            header = json.loads(content.read(length))
        data = np.memmap(file, mode="r", dtype=np.uint8, offset=8 + length)
        found: dict[str, NDArray[Any]] = {}
        for name, (kind, dtype) in _TENSORS.items():
            if header[name]["dtype"] != kind:
                raise ValueError(f"{name} is {header[name]['dtype']}, not {kind}")
            begin, end = header[name]["data_offsets"]
            found[name] = data[begin:end].view(dtype).reshape(header[name]["shape"])
        if found["states"].shape != (len(found["tokens"]), width):
            raise ValueError(f"states are {found['states'].shape}, not {(len(found['tokens']), width)}")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigurationError(f"{file} is no shard of training data ({error}); {REMAKE}", about=file) from error
    return found
