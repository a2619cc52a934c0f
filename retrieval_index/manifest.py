"""An index's manifest: its files with their checksums, and the model and tokenizer it was built for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from retrieval_index.keeping import WAYS
from speculation.errors import ConfigurationError
from speculation.successor_table import FILE as SUCCESSORS

FILE = "manifest.json"
FORMAT = 1
# Most tries of an index.
MAX_SHARDS = 999
# Additional files of an index with hidden states.
STATES, TOKENS = "states.faiss", "tokens.bin"
SEMANTIC = (STATES, TOKENS)
# Marks the end of a document in TOKENS.
END = 2**32 - 1
MIN_DEPTH, MAX_DEPTH = 4, 64
# No real manifest is larger.
MAX_MANIFEST_BYTES = 1 << 20


def trie_files(shard: int) -> tuple[str, str]:
    """Names of a trie and of its counts."""
    number = f"-{shard:03}" if shard else ""
    return f"ngrams{number}.marisa", f"counts{number}.bin"


def part_names(shards: int, *, semantic: bool) -> tuple[str, ...]:
    """The files of an index. No others are allowed, so that no name in a downloaded manifest can become a path."""
    tries = [name for shard in range(shards) for name in trie_files(shard)]
    return (*tries, SUCCESSORS, *(SEMANTIC if semantic else ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """SHA-256 (hexadecimal) and size (bytes) of one file."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What an index consists of.

    Attributes:
        model: name of the target that measured the perplexities.
        tokenizer_sha256: ``tokenizer_digest`` of the tokenizer that made the token ids.
        vocab_size: all token ids are below it.
        documents: documents that were read; ``kept`` of them are in the index.
        tokens: tokens in the index.
        depth: longest n-gram, in tokens.
        perplexity_limit: highest perplexity that was kept; None: no document was dropped.
        keep_by: what was kept a share of, see ``keeping``.
        whole_documents: whether perplexities are of whole documents, not of their beginnings.
        parts: files by name.
        shards: the first token from which on n-grams are in each trie, ascending; the first one is 0.
    """

    format: int = FORMAT
    model: str
    tokenizer_sha256: str
    vocab_size: int
    documents: int
    kept: int
    tokens: int
    depth: int
    perplexity_limit: float | None
    parts: Mapping[str, FilePart]
    shards: tuple[int, ...] = (0,)
    keep_by: str = "documents"
    whole_documents: bool = False

    @property
    def semantic(self) -> bool:
        """Whether it holds hidden states."""
        return STATES in self.parts

    @property
    def filter(self) -> str:
        """How documents were kept, in words."""
        if self.perplexity_limit is None:
            return "all"
        by = {"documents": "", "tokens": ", by tokens", "length": ", by length"}[self.keep_by]
        whole = " of whole documents" if self.whole_documents else ""
        return f"perplexity{whole} up to {self.perplexity_limit:.1f}{by}"

    @property
    def version(self) -> str:
        """16 hexadecimal digits of a hash of the content: equal indexes have equal versions."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """JSON with sorted keys, so that equal manifests give equal texts. What is as usual is not mentioned: a single trie,
        and a filter by a share of the documents over their beginnings."""
        content = asdict(self)
        for name, usual in (("shards", (0,)), ("keep_by", "documents"), ("whole_documents", False)):
            if content[name] == usual:
                del content[name]
        return json.dumps(content, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes, origin: str) -> Manifest:
        """Read a manifest.

        Args:
            origin: where it comes from, for the error.

        Raises:
            ConfigurationError: it is malformed, or of another format.
        """
        try:
            if len(text) > MAX_MANIFEST_BYTES:
                raise ValueError("too long")
            content: dict[str, Any] = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, not {FORMAT}")
            parts = {name: FilePart(sha256=str(p["sha256"]), size=p["size"]) for name, p in content["parts"].items()}
            shards = tuple(content.get("shards", (0,)))
            if not (0 < len(shards) <= MAX_SHARDS and all(type(first) is int for first in shards)):
                raise ValueError("its shards are not a list of tokens")
            if shards[0] != 0 or any(one >= other for one, other in pairwise(shards)):
                raise ValueError("its shards do not ascend from 0")
            expected = part_names(len(shards), semantic=STATES in parts)
            if set(parts) != set(expected):
                raise ValueError(f"its parts are {sorted(parts)}, not {sorted(expected)}")
            manifest = Manifest(**(content | {"parts": parts, "shards": shards}))
            numbers = [manifest.vocab_size, manifest.documents, manifest.kept, manifest.tokens, manifest.depth]
            if not all(type(number) is int and number >= 0 for number in [*numbers, *(p.size for p in parts.values())]):
                raise ValueError("a count is not a whole number")
            if manifest.keep_by not in WAYS or type(manifest.whole_documents) is not bool:
                raise ValueError("it does not say how documents were kept")
            if not (isinstance(manifest.model, str) and isinstance(manifest.tokenizer_sha256, str)):
                raise ValueError("it does not say for which model it is")
            if type(manifest.perplexity_limit) not in (int, float, type(None)):
                raise ValueError("its perplexity_limit is no number")
            if not (MIN_DEPTH <= manifest.depth <= MAX_DEPTH):
                raise ValueError(f"depth {manifest.depth}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigurationError(f"not a manifest of an index ({error})", field=origin) from error
        return manifest


def part_of(path: Path) -> FilePart:
    """Checksum and size of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FilePart(sha256=digest.hexdigest(), size=path.stat().st_size)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a built index.

    Raises:
        ConfigurationError: it is missing or damaged.
    """
    file = folder / FILE
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{folder} holds no index: {FILE} cannot be read ({error.strerror}); see outrider index build", about=folder
        ) from error
    return Manifest.from_json(text, str(file))


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare the size and checksum of every file with the manifest.

    Raises:
        ConfigurationError: a file is missing, cut off or altered; names it.
    """
    for name, expected in manifest.parts.items():
        file = folder / name
        if not file.is_file():
            raise ConfigurationError(f"the index in {folder} lacks {name}", about=folder)
        size = file.stat().st_size
        if size != expected.size:
            raise ConfigurationError(f"{file} has {size} bytes instead of {expected.size}: cut off, or altered", about=file)
        if part_of(file).sha256 != expected.sha256:
            raise ConfigurationError(f"{file} has been altered: its checksum differs from the manifest's", about=file)
