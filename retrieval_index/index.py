"""An index in use: verified, mapped into memory and looked up."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_index.manifest import Manifest, read_manifest, verify
from retrieval_index.ngram_trie import NgramTrie
from speculation.errors import ConfigurationError
from speculation.messages import Continuation, RetrievalQuery, Retrieved
from speculation.types import Features

if TYPE_CHECKING:
    from retrieval_index.state_index import StateIndex

log = logging.getLogger(__name__)


class Index:
    """An open index.

    Args:
        state_width: numbers in a hidden state of the served model; None: hidden states will not be looked up.

    Raises:
        ConfigurationError: its files cannot be mapped, or its hidden states are another model's.
    """

    def __init__(self, folder: Path, manifest: Manifest, state_width: int | None = None) -> None:
        self.manifest = manifest
        self._trie = NgramTrie(folder, manifest.depth, manifest.shards)
        self._states = None if state_width is None else _map_states(folder, state_width)
        self._version = manifest.version

    def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
        """Answer several queries. A hidden state that does not fit the index finds nothing."""
        return [Retrieved(continuations=tuple(self._find(query)), index_version=self._version) for query in queries]

    def _find(self, query: RetrievalQuery) -> Sequence[Continuation]:
        if query.state is None:
            return self._trie.look_up(query.suffix, query.max_continuations, query.max_length)
        if self._states is None or not query.suffix:
            return ()
        state = query.state
        if (state.rows, state.width) != (1, self._states.width) or state.dtype not in ("float16", "bfloat16"):
            log.warning("a hidden state of %d x %d %s is not looked up", state.rows, state.width, state.dtype)
            return ()
        numbers = _numbers(state)
        return self._states.look_up(numbers, query.suffix[-1], query.max_continuations, query.max_length)


def _numbers(state: Features) -> NDArray[np.float32]:
    if state.dtype == "bfloat16":
        # The upper half of a float32.
        return (np.frombuffer(bytes(state.data), dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(bytes(state.data), dtype="<f2").astype(np.float32)


def _map_states(folder: Path, width: int) -> StateIndex:
    # FAISS is imported only where hidden states are looked up.
    from retrieval_index.state_index import StateIndex

    states = StateIndex(folder)
    if states.width != width:
        raise ConfigurationError(
            f"the index {folder} holds hidden states of {states.width} numbers, the served model's have {width}: "
            "build one with --model set to the served model",
            about=folder,
        )
    return states


def open_index(folder: Path, tokenizer_sha256: str | None = None, state_width: int | None = None) -> Index:
    """Verify an index and map it into memory.

    Args:
        tokenizer_sha256: digest of the served model's tokenizer; None: not compared.
        state_width: numbers in a hidden state of the served model; None: hidden states will not be looked up.

    Raises:
        ConfigurationError: the index is damaged, was built for another tokenizer or model, or lacks the hidden states.
    """
    manifest = read_manifest(folder)
    check_index(manifest, tokenizer_sha256, str(folder), semantic=state_width is not None)
    verify(folder, manifest)
    return Index(folder, manifest, state_width)


def check_index(manifest: Manifest, tokenizer_sha256: str | None, origin: str, *, semantic: bool) -> None:
    """Check that an index was built for the served model's tokenizer and, if ``semantic``, that it holds hidden states.

    Args:
        tokenizer_sha256: digest of the served model's tokenizer; None: not compared.
        origin: where the index comes from, for the error.

    Raises:
        ConfigurationError: one of them is not so.
    """
    if semantic and not manifest.semantic:
        raise ConfigurationError(
            f"the index {origin} holds no hidden states: build it with --semantic, or unset retrieval.semantic", about=origin
        )
    if tokenizer_sha256 is not None and manifest.tokenizer_sha256 != tokenizer_sha256:
        raise ConfigurationError(
            f"the index {origin} was built for the tokenizer of {manifest.model} ({manifest.tokenizer_sha256[:12]}), "
            f"the served model's is another ({tokenizer_sha256[:12]}): build one with --model set to the served model",
            about=origin,
        )
