"""The manifest of a folder of training data: what all its sequences follow from, and the checksums of its shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from speculation.errors import ConfigurationError
from speculation.files import write_whole

FILE = "manifest.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataTarget(_Part):
    """The model that made the data.

    Attributes:
        weights_sha256: over config.json and the weight files.
        eos_token_ids: tokens that end an answer or a turn.
    """

    name: str
    weights_sha256: str
    tokenizer_sha256: str
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]


class DataSampling(_Part):
    """What determines the sequences, besides the prompts. Every sequence's seed follows from its id and ``seed``."""

    max_new_tokens: int
    samples_per_prompt: int
    max_prompt_tokens: int
    shard_sequences: int
    seed: int


class ShardEntry(_Part):
    """One shard: its file, contents and checksum."""

    file: str
    sequences: int
    rows: int
    answer_tokens: int
    size: int
    sha256: str


class DataManifest(_Part):
    """What a folder of training data holds.

    Attributes:
        layers: of the states, numbered as in ``Features.layers``.
        dtype: of the states.
        domains: names that the shards' ``domain`` counts.
        given: those of them whose answers are given: the target has read them, and written all others.
        prompts_sha256: of all prompts, in order.
    """

    format: Literal[1] = 1
    target: DataTarget
    layers: tuple[int, ...]
    dtype: Literal["float16"] = "float16"
    sampling: DataSampling
    domains: tuple[str, ...]
    given: tuple[str, ...] = ()
    prompts: int
    prompts_sha256: str
    shards: tuple[ShardEntry, ...] = ()

    @property
    def origin(self) -> str:
        """JSON of all that the sequences follow from. What is as usual is not mentioned, as in data of older versions."""
        return self.model_dump_json(exclude={"shards"} if self.given else {"shards", "given"})

    @property
    def width(self) -> int:
        """Numbers in a row of states."""
        return len(self.layers) * self.target.hidden_size


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Write the manifest whole.

    Raises:
        OSError: it cannot be written; the earlier one stays.
    """
    write_whole(folder / FILE, manifest.model_dump_json(indent=1).encode())


def read_data_manifest(folder: Path) -> DataManifest:
    """The manifest of a folder of training data.

    Raises:
        ConfigurationError: it is missing or damaged.
    """
    file = folder / FILE
    try:
        return DataManifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"{folder} holds no training data: {FILE} cannot be read ({error.strerror}); see outrider train data",
            about=folder,
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"not a manifest of training data ({where}: {first['msg']})", field=file) from error


def check_layers(where: str, held: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Whether data hold the states of all layers that are wanted.

    Raises:
        ConfigurationError: they do not; says which command makes such data.
    """
    if lacking := [layer for layer in wanted if layer not in held]:
        every = ",".join(map(str, [*sorted({*held, *wanted} - {-1}), -1]))
        raise ConfigurationError(
            f"make such data in another folder: outrider train data --layers {every}",
            place=where,
            field="the layers of its states",
            verb="are",
            value=list(held),
            allowed=f"among them {', '.join(map(str, lacking))}",
        )
