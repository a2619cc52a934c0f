"""An index that is in use: verified, mapped, and asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval_index.manifest import Manifest, read_manifest, verify
from retrieval_index.ngram_trie import NgramTrie
from speculation.errors import ConfigurationError
from speculation.messages import Continuation, RetrievalQuery, Retrieved

if TYPE_CHECKING:
    from retrieval_index.vectors import StateIndex

log = logging.getLogger(__name__)


class Index:
    """A built index, open.

    Args:
        state_width: numbers of a hidden state, where states will be looked up.

    Attributes:
        manifest: what it is.

    Raises:
        ConfigurationError: its states are none, or another model's.
    """

    def __init__(self, folder: Path, manifest: Manifest, state_width: int | None = None) -> None:
        self.manifest = manifest
        self._trie = NgramTrie(folder, manifest.depth)
        self._states = None if state_width is None else _map_states(folder, state_width)
        self._version = manifest.version

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """Answer several queries. A hidden state that is not of the index's model finds nothing."""
        return [Retrieved(continuations=tuple(self._find(query)), index_version=self._version) for query in queries]

    def _find(self, query: RetrievalQuery) -> Sequence[Continuation]:
        if query.state is None:
            return self._trie.look_up(query.suffix, query.max_continuations, query.max_length)
        if self._states is None or not query.suffix:
            return ()
        state = query.state
        if (state.rows, state.width, state.dtype) != (1, self._states.width, "float16"):
            log.warning("a hidden state of %d x %d %s is not looked up", state.rows, state.width, state.dtype)
            return ()
        numbers = np.frombuffer(state.data, dtype="<f2").astype(np.float32)
        return self._states.look_up(numbers, query.suffix[-1], query.max_continuations, query.max_length)


def _map_states(folder: Path, width: int) -> StateIndex:
    # FAISS is only loaded where there is something for it.
    from retrieval_index.vectors import StateIndex

    states = StateIndex(folder)
    if states.width != width:
        raise ConfigurationError(
            f"the index {folder} holds hidden states of {states.width} numbers, the served model's have {width}: "
            "build one with --model set to the served model"
        )
    return states


def open_index(folder: Path, tokenizer_sha256: str | None = None, state_width: int | None = None) -> Index:
    """Verify and map an index.

    Args:
        tokenizer_sha256: of the tokenizer whose ids will be looked up; None: do not ask.
        state_width: numbers of a hidden state, where states will be looked up.

    Raises:
        ConfigurationError: it is damaged, was made for another tokenizer or model, or holds no hidden states.
    """
    manifest = read_manifest(folder)
    check_index(manifest, tokenizer_sha256, str(folder), semantic=state_width is not None)
    verify(folder, manifest)
    return Index(folder, manifest, state_width)


def check_index(manifest: Manifest, tokenizer_sha256: str | None, origin: str, *, semantic: bool) -> None:
    """Check that an index speaks of the served model's tokens, and with ``semantic`` that it holds hidden states.

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
