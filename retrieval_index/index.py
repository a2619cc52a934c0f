"""An index that is in use: verified, mapped, and asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrieval_index.manifest import Manifest, read_manifest, verify
from retrieval_index.ngrams import NgramTrie
from speculation.errors import ConfigurationError
from speculation.messages import RetrievalQuery, Retrieved


class Index:
    """A built index, open.

    Attributes:
        manifest: what it is.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._trie = NgramTrie(folder, manifest.depth)
        self._version = manifest.version

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """Answer several queries."""
        return [
            Retrieved(
                continuations=tuple(self._trie.look_up(query.suffix, query.max_continuations, query.max_length)),
                index_version=self._version,
            )
            for query in queries
        ]


def open_index(folder: Path, tokenizer_sha256: str | None = None) -> Index:
    """Verify and map an index.

    Args:
        tokenizer_sha256: of the tokenizer whose ids will be looked up; None: do not ask.

    Raises:
        ConfigurationError: it is damaged, or was made for another tokenizer.
    """
    manifest = read_manifest(folder)
    check_tokenizer(manifest, tokenizer_sha256, str(folder))
    verify(folder, manifest)
    return Index(folder, manifest)


def check_tokenizer(manifest: Manifest, tokenizer_sha256: str | None, origin: str) -> None:
    """Check that an index speaks of the served model's tokens.

    Raises:
        ConfigurationError: it does not.
    """
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise ConfigurationError(
            f"the index {origin} was built for the tokenizer of {manifest.model} ({manifest.tokenizer_sha256[:12]}), "
            f"the served model's is another ({tokenizer_sha256[:12]}): build one with --model set to the served model"
        )
