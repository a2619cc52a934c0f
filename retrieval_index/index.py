"""An index that is in use: verified, mapped, and asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_index.manifest import Manifest, read_manifest, verify
from retrieval_index.ngrams import NgramTrie
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import Continuation, RetrievalQuery, Retrieved
from speculation.types import Features

if TYPE_CHECKING:
    from retrieval_index.vectors import StateIndex


class Index:
    """A built index, open.

    Attributes:
        manifest: what it is.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._trie = NgramTrie(folder, manifest.depth)
        self._states = _map_states(folder) if manifest.semantic else None
        self._version = manifest.version

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """Answer several queries. One with a hidden state finds nothing in an index that has none.

        Raises:
            InvalidArgument: a hidden state is not of the model that the index was built with.
        """
        return [Retrieved(continuations=tuple(self._find(query)), index_version=self._version) for query in queries]

    def _find(self, query: RetrievalQuery) -> Sequence[Continuation]:
        if query.state is None:
            return self._trie.look_up(query.suffix, query.max_continuations, query.max_length)
        if self._states is None or not query.suffix:
            return ()
        state = _as_row(query.state, self._states.width)
        return self._states.look_up(state, query.suffix[-1:], query.max_continuations, query.max_length)[0]


def _map_states(folder: Path) -> StateIndex:
    # FAISS is only loaded where there is something for it.
    from retrieval_index.vectors import StateIndex

    return StateIndex(folder)


def _as_row(state: Features, width: int) -> NDArray[np.float32]:
    if (state.rows, state.width) != (1, width) or state.dtype not in ("float16", "float32"):
        given = f"{state.rows} x {state.width} {state.dtype}"
        raise InvalidArgument("state", given, f"1 x {width} float16 or float32: that of the index's model")
    return np.frombuffer(state.data, dtype=np.dtype(state.dtype).newbyteorder("<")).astype(np.float32)[None]


def open_index(folder: Path, tokenizer_sha256: str | None = None, *, semantic: bool = False) -> Index:
    """Verify and map an index.

    Args:
        tokenizer_sha256: of the tokenizer whose ids will be looked up; None: do not ask.
        semantic: whether hidden states will be looked up.

    Raises:
        ConfigurationError: it is damaged, was made for another tokenizer, or holds no hidden states.
    """
    manifest = read_manifest(folder)
    check_index(manifest, tokenizer_sha256, str(folder), semantic=semantic)
    verify(folder, manifest)
    return Index(folder, manifest)


def check_index(manifest: Manifest, tokenizer_sha256: str | None, origin: str, *, semantic: bool) -> None:
    """Check that an index speaks of the served model's tokens, and with ``semantic`` of its hidden states.

    Raises:
        ConfigurationError: it does not.
    """
    if semantic and not manifest.semantic:
        raise ConfigurationError(
            f"the index {origin} holds no hidden states: build it with --semantic, or unset retrieval.semantic"
        )
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise ConfigurationError(
            f"the index {origin} was built for the tokenizer of {manifest.model} ({manifest.tokenizer_sha256[:12]}), "
            f"the served model's is another ({tokenizer_sha256[:12]}): build one with --model set to the served model"
        )
