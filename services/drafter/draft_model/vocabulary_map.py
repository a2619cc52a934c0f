"""Which of a draft model's token ids stand for which of the target's.

With the target's own tokeniser, they are the same. Otherwise tokens that stand for the same bytes are mapped to each other,
and the draft model's other tokens are never drafted: token-level intersection (TLI, Timor et al. 2025, arXiv 2502.05202).
The draft distribution is then over the tokens of both, so the rules of acceptance remain lossless.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from services.model_files.byte_letters import byte_of_letter
from services.model_files.folder import read_json, reading, text_config
from services.model_files.weights.shared import read_shared
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Written by `outrider train vocabulary`: ``d2t`` [kept ids], int64; the kept id i stands for token i + d2t[i].
VOCABULARY_FILE = "vocabulary.safetensors"
# A byte in sentencepiece's vocabularies.
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """A map between the vocabularies of a draft model and its target.

    Attributes:
        kept: [kept ids], ascending: the draft model's ids that can be drafted; None: all.
        targets: [kept ids], the target's id of each; None: the same ids.
    """

    kept: NDArray[np.int64] | None = None
    targets: NDArray[np.int64] | None = None
    draft_size: int = 0
    _ids: dict[int, tuple[int, ...]] | None = None
    _tokenizers: tuple[Tokenizer, Tokenizer] | None = field(default=None)

    @property
    def is_targets(self) -> bool:
        """Whether the two tokenisers are the same."""
        return self._ids is None

    def encode(self, tokens: Iterable[int]) -> list[int]:
        """The draft model's ids for the target's tokens.

        A token without its like is spelled in the draft model's tokens, each by itself: what stands for a text never changes
        when the text goes on. A token that no text stands for is left out.
        """
        if self._ids is None:
            return [token for token in tokens if token < self.draft_size]
        return [own for token in tokens for own in self._spelled(token)]

    def _spelled(self, token: int) -> tuple[int, ...]:
        assert self._ids is not None and self._tokenizers is not None
        found = self._ids.get(token)
        if found is None:
            target, draft = self._tokenizers
            text = target.decode([token], skip_special_tokens=False)
            spelled = () if "\ufffd" in text else tuple(draft.encode(text, add_special_tokens=False).ids)
            found = self._ids[token] = tuple(own for own in spelled if own < self.draft_size)
        return found


def map_vocabularies(draft: Path, target: Path) -> VocabularyMap:
    """The map between two models' folders, each with config.json and tokenizer.json.

    If the draft model's folder has a ``vocabulary.safetensors``, only the tokens listed there are drafted.

    Raises:
        ConfigurationError: a file is missing or damaged, or the vocabularies have no token in common.
    """
    draft_size, target_size = _size(draft), _size(target)
    wanted = _Vocabulary(target)
    # A model that shares the target's embeddings has its tokeniser.
    own = wanted if read_shared(draft) is not None else _Vocabulary(draft)
    listed = _listed(draft, draft_size)
    if own.same_as(wanted):
        kept = np.arange(min(draft_size, target_size)) if listed is None else listed[listed < target_size]
        whole = len(kept) == draft_size
        return VocabularyMap(None if whole else kept, None if whole else kept, draft_size)
    ids = wanted.ids
    common = {own_id: ids[key] for key, own_id in own.ids.items() if key in ids}
    common = {each: token for each, token in common.items() if each < draft_size and token < target_size}
    if listed is not None:
        common = {each: common[each] for each in listed.tolist() if each in common}
    if not common:
        raise ConfigurationError(
            f"the draft model at {draft} and the target at {target} have no token in common: a draft model needs the "
            "target's tokeniser, or one that shares tokens with it",
            about=draft,
        )
    log.info(
        "draft model %s has a tokeniser of its own: %d of its %d tokens are the target's", draft, len(common), draft_size
    )
    kept = np.array(sorted(common))
    return VocabularyMap(
        kept,
        np.array([common[each] for each in kept.tolist()]),
        draft_size,
        {token: (each,) for each, token in common.items()},
        (wanted.tokenizer, own.tokenizer),
    )


def _size(folder: Path) -> int:
    size = text_config(read_json(folder / "config.json")).get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(
            f"vocab_size is {size!r} in {folder / 'config.json'}: must be a number of at least 1", about="vocab_size"
        )
    return size


def _listed(folder: Path, size: int) -> NDArray[np.int64] | None:
    file = folder / VOCABULARY_FILE
    if not file.is_file():
        return None
    with reading(f"read {file}", about=file):
        offsets = load_file(file)["d2t"].astype(np.int64)
    ids = offsets + np.arange(len(offsets))
    if offsets.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= size:
        raise ConfigurationError(
            f"d2t in {file} must give at least one id, ascending, each below vocab_size ({size})", about="d2t"
        )
    return ids


class _Vocabulary:
    """The tokens of a tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"
        if not self._file.is_file():
            raise ConfigurationError(
                f"{folder} holds no tokenizer.json, by which the tokens of a draft model and of its target are compared",
                about=folder,
            )
        with reading(f"read {self._file}", about=self._file):
            self._hash = hashlib.sha256(self._file.read_bytes()).digest()

    def same_as(self, other: _Vocabulary) -> bool:
        """Whether equal ids stand for equal tokens."""
        if self._hash == other._hash:
            return True
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab() and self.ids == other.ids)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokeniser itself."""
        with reading(f"read {self._file}", about=self._file):
            return Tokenizer.from_file(str(self._file))

    @cached_property
    def ids(self) -> dict[tuple[bytes, bool], int]:
        """Ids by the bytes that a token stands for, and whether it is an added one; the first of equals."""
        content = read_json(self._file, "tokeniser")
        added = self.tokenizer.get_added_tokens_decoder()
        on_bytes = '"ByteLevel"' in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])
        found: dict[tuple[bytes, bool], int] = {}
        for token, own_id in sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1]):
            is_added = own_id in added
            found.setdefault((token.encode() if is_added else _bytes(token, on_bytes), is_added), own_id)
        return found


def _bytes(token: str, on_bytes: bool) -> bytes:
    """The bytes that a token stands for, in a tokeniser on bytes (GPT-2's) or on characters (sentencepiece's)."""
    if on_bytes:
        letters = byte_of_letter()
        if all(letter in letters for letter in token):
            return bytes(letters[letter] for letter in token)
    elif _BYTE.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
