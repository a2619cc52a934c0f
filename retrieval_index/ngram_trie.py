"""The n-gram trie: which tokens followed a given suffix in the corpus (REST, He et al., NAACL 2024, with 32-bit token ids).

Every ``depth`` consecutive tokens of the corpus are a key, four bytes per token, in a memory-mapped MARISA trie; a second
file counts how often each key occurred. A look-up searches keys that begin with the longest possible suffix of the text; the
trie gives their continuations, frequent branches first.
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
# A single token occurs too often to predict anything.
_SHORTEST_MATCH = 2


def build(documents: Iterable[NDArray[np.uint32]], depth: int, folder: Path) -> tuple[int, int]:
    """Write the trie of ``documents`` ([tokens] each) into ``folder``.

    Keys are ``depth`` tokens long, shorter only at the end of a document.

    Returns:
        The number of keys and the number of tokens.
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
    # The weights order the branches, so that iteration meets frequent ones first.
    keys = list(counted)
    trie = marisa_trie.BinaryTrie(keys, weights=[float(count) for count in counted.values()])
    trie.save(str(folder / KEYS))
    counts = np.zeros(len(keys), dtype="<u2")
    for key, count in counted.items():
        counts[trie.key_id(key)] = min(count, _LARGEST_COUNT)
    counts.tofile(folder / COUNTS)
    return len(keys), tokens


class NgramTrie:
    """A built trie, mapped into memory. Look-ups need no lock.

    Args:
        depth: longest key, in tokens.

    Raises:
        ConfigurationError: the files cannot be mapped, or do not belong together.
    """

    def __init__(self, folder: Path, depth: int) -> None:
        self._depth = depth
        self._trie = marisa_trie.BinaryTrie()
        try:
            self._trie.mmap(str(folder / KEYS))
            self._counts: NDArray[np.uint16] = np.memmap(folder / COUNTS, dtype="<u2", mode="r")
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(f"cannot map the index in {folder}: {error}", about=folder) from error
        if len(self._counts) != len(self._trie) or not self._counts.all():
            raise ConfigurationError(
                f"{folder / COUNTS} does not hold a count for each of the {len(self._trie)} n-grams", about=folder / COUNTS
            )

    def __len__(self) -> int:
        return len(self._trie)

    def look_up(self, suffix: Sequence[int], max_continuations: int, max_length: int) -> list[Continuation]:
        """What followed the longest suffix of ``suffix`` that is in the trie, with at most ``max_length`` tokens each.

        The matched suffix takes at most half of a key, so that the other half is left for the continuation.
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
