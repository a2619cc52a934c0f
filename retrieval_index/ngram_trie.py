"""The n-gram trie: which tokens followed an ending in the corpus (REST, He et al., NAACL 2024, with 32-bit token ids).

Every stretch of ``depth`` tokens of the corpus is a key, four bytes a token, in a memory-mapped MARISA trie; beside it lies
how often each key occurred. An ending is looked up as a prefix: the longest one that is there counts, and the trie gives its
continuations, frequent branches first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import marisa_trie
import numpy as np
from numpy.typing import NDArray

from retrieval_index.manifest import PARTS
from speculation.errors import ConfigurationError
from speculation.messages import Continuation

KEYS, COUNTS, _ = PARTS

_TOKEN_BYTES = 4
_LARGEST_COUNT = 2**16 - 1
# Shorter endings occur everywhere, and say nothing.
_SHORTEST_MATCH = 2


def build(documents: Iterable[NDArray[np.uint32]], depth: int, folder: Path) -> tuple[int, int]:
    """Write the trie of ``documents`` ([tokens] each) into ``folder``; returns its keys and the tokens they come from.

    Keys are at most ``depth`` tokens long, shorter only at a document's end.
    """
    counted: Counter[bytes] = Counter()
    tokens = 0
    for document in documents:
        tokens += len(document)
        encoded = document.astype(">u4").tobytes()
        width = _TOKEN_BYTES * depth
        counted.update(
            encoded[start : start + width] for start in range(0, len(encoded) - _SHORTEST_MATCH * _TOKEN_BYTES, _TOKEN_BYTES)
        )
    # Weights order the branches: the frequent ones are found first.
    keys = list(counted)
    trie = marisa_trie.BinaryTrie(keys, weights=[float(count) for count in counted.values()])
    trie.save(str(folder / KEYS))
    counts = np.zeros(len(keys), dtype="<u2")
    for key, count in counted.items():
        counts[trie.key_id(key)] = min(count, _LARGEST_COUNT)
    counts.tofile(folder / COUNTS)
    return len(keys), tokens


class NgramTrie:
    """A built trie, mapped into memory. Looking up needs no lock.

    Args:
        depth: longest key, in tokens.
    """

    def __init__(self, folder: Path, depth: int) -> None:
        self._depth = depth
        self._trie = marisa_trie.BinaryTrie()
        try:
            self._trie.mmap(str(folder / KEYS))
            self._counts: NDArray[np.uint16] = np.memmap(folder / COUNTS, dtype="<u2", mode="r")
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(f"cannot map the index in {folder}: {error}") from error
        if len(self._counts) != len(self._trie) or not self._counts.all():
            raise ConfigurationError(f"{folder / COUNTS} is no list of how often each of {len(self._trie)} n-grams occurs")

    def __len__(self) -> int:
        return len(self._trie)

    def look_up(self, suffix: Sequence[int], max_continuations: int, max_length: int) -> list[Continuation]:
        """What followed the longest known ending of ``suffix``, at most ``max_length`` tokens of it.

        Half of a key at most is spent on the ending, so that something is left to say.
        """
        for length in range(min(len(suffix), self._depth // 2), _SHORTEST_MATCH - 1, -1):
            prefix = np.asarray(suffix[-length:], dtype=">u4").tobytes()
            keys = list(islice(self._trie.iterkeys(prefix), max_continuations))
            found = self._continuations(keys, len(prefix), max_length, length)
            if found:
                return found
        return []

    def _continuations(self, keys: Sequence[bytes], skipped: int, max_length: int, length: int) -> list[Continuation]:
        end = skipped + _TOKEN_BYTES * max_length
        counted: dict[bytes, int] = {}
        for key in keys:
            rest = key[skipped:end]
            if rest:
                counted[rest] = counted.get(rest, 0) + int(self._counts[self._trie.key_id(key)])
        return [
            Continuation(tokens=tuple(np.frombuffer(rest, dtype=">u4").tolist()), count=count, match_length=length)
            for rest, count in counted.items()
        ]
