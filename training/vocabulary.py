"""The draft vocabulary: which target tokens a drafter can propose (FR-Spec; EAGLE-3's d2t and t2d).

Three quarters of it are the tokens that occur most often in the target's answers, the rest the lowest ids, which byte-pair
merges learn first: they cover the text that the answers do not. Tokens that end a turn are always in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from services.drafter.heads.files.target_shape import TRAINING
from services.model_files.folder import one_line
from services.model_files.weights.headers import BLOCKS_FILE, SINGLE
from speculation.errors import ConfigurationError
from speculation.files import write_whole
from training.data_manifest import DataManifest
from training.shards import TrainingSequence, read_shards

TENSORS = "vocabulary.safetensors"
RECORD = "vocabulary.json"


class VocabularyRecord(BaseModel):
    """What a draft vocabulary was counted from, and how much it covers.

    Attributes:
        counted: tokens of answers.
        forced: ids that are in it whatever their count.
        recall: share of the held-out answers' tokens that are in it, by domain; ``all`` counts every domain.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    tokenizer_sha256: str
    vocab_size: int
    size: int
    counted: int
    forced: tuple[int, ...]
    recall: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenVocabulary:
    """A draft vocabulary with its record; ``ids`` is int64 [V_d], ascending, the target's ids."""

    ids: NDArray[np.int64]
    record: VocabularyRecord

    @property
    def d2t(self) -> NDArray[np.int64]:
        """EAGLE's map, [V_d]: target id = index + offset."""
        return self.ids - np.arange(len(self.ids))

    @property
    def t2d(self) -> NDArray[np.bool_]:
        """EAGLE's map, [V]: whether a target token is in the vocabulary."""
        held = np.zeros(self.record.vocab_size, dtype=np.bool_)
        held[self.ids] = True
        return held


def answer_counts(sequences: Iterable[TrainingSequence], vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs in the answers, [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        counts += np.bincount(sequence.tokens[sequence.prompt_length :], minlength=vocab_size)
    return counts


def choose_ids(counts: NDArray[np.int64], size: int, forced: Iterable[int]) -> NDArray[np.int64]:
    """``size`` ids, ascending: the forced ones, then the most frequent ones up to three quarters of it, then the lowest.

    Raises:
        ConfigurationError: ``size`` does not fit.
    """
    first = sorted(set(forced))
    least = max(2, len(first))
    if not least <= size <= len(counts):
        raise ConfigurationError(
            field="--size", verb="", value=size, allowed=f"from {least} to {len(counts)}, the target's vocabulary"
        )
    held = np.zeros(len(counts), dtype=np.bool_)
    held[first] = True
    # Equally frequent tokens are taken by their id.
    by_count = np.lexsort((np.arange(len(counts)), -counts))
    by_count = by_count[(counts[by_count] > 0) & ~held[by_count]]
    held[by_count[: max(0, size * 3 // 4 - len(first))]] = True
    held[np.flatnonzero(~held)[: size - int(held.sum())]] = True
    return np.flatnonzero(held).astype(np.int64)


def recall_by_domain(ids: NDArray[np.int64], sequences: Iterable[TrainingSequence], vocab_size: int) -> dict[str, float]:
    """Share of the answers' tokens that are among ``ids``, by domain and over ``all``."""
    held = np.zeros(vocab_size, dtype=np.bool_)
    held[ids] = True
    found: dict[str, list[int]] = {}
    for sequence in sequences:
        answer = sequence.tokens[sequence.prompt_length :]
        for name in ("all", sequence.domain):
            hits = found.setdefault(name, [0, 0])
            hits[0] += int(held[answer].sum())
            hits[1] += len(answer)
    return {name: hits / of for name, (hits, of) in sorted(found.items()) if of}


def build_vocabulary(folder: Path, size: int) -> ChosenVocabulary:
    """Count the answers of the training split in a folder of data, and measure the recall on the held-out split.

    Raises:
        ConfigurationError: there are no data, they are damaged, or ``size`` does not fit.
    """
    train = read_shards(folder, "train")
    target = train.manifest.target
    counts = answer_counts(train, target.vocab_size)
    ids = choose_ids(counts, size, target.eos_token_ids)
    held_out = read_shards(folder, "validation", verify=False)
    record = VocabularyRecord(
        target=target.name,
        tokenizer_sha256=target.tokenizer_sha256,
        vocab_size=target.vocab_size,
        size=size,
        counted=int(counts.sum()),
        forced=target.eos_token_ids,
        recall=recall_by_domain(ids, held_out, target.vocab_size),
    )
    return ChosenVocabulary(ids=ids, record=record)


def write_vocabulary(folder: Path, chosen: ChosenVocabulary) -> None:
    """Write ``d2t`` int64 [V_d], ``t2d`` bool [V], and the record.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TENSORS, save({"d2t": chosen.d2t, "t2d": chosen.t2d}))
    write_whole(folder / RECORD, chosen.record.model_dump_json(indent=1).encode())


def read_vocabulary(folder: Path, manifest: DataManifest) -> ChosenVocabulary:
    """The draft vocabulary in a folder, or the one that the checkpoint in it drafts, for data of the same target.

    Raises:
        ConfigurationError: it is missing, damaged, or for another tokenizer.
    """
    where, make = f"{folder}: the draft vocabulary", "make it with outrider train vocabulary"
    try:
        d2t, t2d = _maps(folder)
        record = VocabularyRecord.model_validate(_record(folder))
    except OSError as error:
        raise ConfigurationError(
            f"{folder} holds no draft vocabulary ({error.strerror or error}); {make}", about=folder
        ) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{where} is damaged ({one_line(error)}); {make}", about=where) from error
    if (record.tokenizer_sha256, record.vocab_size) != (manifest.target.tokenizer_sha256, manifest.target.vocab_size):
        raise ConfigurationError(f"{where} is for {record.target}, not {manifest.target.name}; {make}", about=where)
    chosen = ChosenVocabulary(ids=d2t + np.arange(len(d2t)), record=record)
    if len(d2t) != record.size or not np.array_equal(chosen.t2d, t2d):
        raise ConfigurationError(f"{where} is damaged (d2t and t2d disagree); {make}", about=where)
    return chosen


def _maps(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """d2t and t2d; heads keep them among their weights."""
    files = [file for name in (TENSORS, BLOCKS_FILE, SINGLE) if (file := folder / name).is_file()]
    with safe_open(files[0] if files else folder / TENSORS, framework="numpy") as tensors:
        return tensors.get_tensor("d2t"), tensors.get_tensor("t2d")


def _record(folder: Path) -> Any:
    """What was written of it; checkpoints keep it in their training.json."""
    if (folder / RECORD).is_file() or not (folder / TRAINING).is_file():
        return json.loads((folder / RECORD).read_bytes())
    return json.loads((folder / TRAINING).read_bytes())["vocabulary"]
