"""The n-gram trie: which tokens followed a given suffix in the corpus (REST, He et al., NAACL 2024, with 32-bit token ids).

Every ``depth`` consecutive tokens of the corpus are a key, four bytes per token, in a memory-mapped MARISA trie; a second
file counts how often each key occurred. A look-up searches keys that begin with the longest possible suffix of the text; the
trie gives their continuations, frequent branches first.

A large corpus has several tries, by the first token of the keys, so that a build holds the keys of one at a time. A look-up
needs one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import marisa_trie
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from retrieval_index.manifest import END, MAX_SHARDS, trie_files
from speculation.errors import ConfigurationError
from speculation.messages import Continuation

_TOKEN_BYTES = 4
_LARGEST_COUNT = 2**16 - 1
# A single token occurs too often to predict anything.
_SHORTEST_MATCH = 2


# Tokens of the keys in one trie, unless a single first token has more. A build holds some 9 bytes of each.
_SHARD = 64_000_000
# Keys that are read or written at once.
_AT_ONCE = 65_536


def build(
    documents: Sequence[NDArray[np.uint32]],
    depth: int,
    folder: Path,
    *,
    shard: int | None = None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, tuple[int, ...]]:
    """Write the tries of ``documents`` ([tokens] each) into ``folder``.

    Keys are ``depth`` tokens long, shorter only at the end of a document.

    Args:
        shard: most positions for one trie, as far as possible; None: as many as a build can well hold.
        advance: called with how many tries there are so far, and in all.

    Returns:
        The number of keys, and ``Manifest.shards``.
    """
    begins = [document[:-_SHORTEST_MATCH] for document in documents]
    shards = _shards(begins, shard or _SHARD // depth)
    keys = 0
    for number, first in enumerate(shards):
        advance(number, len(shards))
        last = shards[number + 1] if number + 1 < len(shards) else np.inf
        keys += _build_one(documents, begins, (first, last), depth, folder, number)
    advance(len(shards), len(shards))
    return keys, shards


def _shards(begins: Sequence[NDArray[np.uint32]], most: int) -> tuple[int, ...]:
    """The first token of each trie: as few tries as there can be of at most ``most`` positions each."""
    size = 1 + max((int(tokens.max()) for tokens in begins if len(tokens)), default=0)
    counts = np.zeros(size, dtype=np.int64)
    for tokens in begins:
        counts += np.bincount(tokens, minlength=size)
    most = max(most, -(-2 * int(counts.sum()) // (MAX_SHARDS - 1)))
    found, held = [0], 0
    for token in np.flatnonzero(counts).tolist():
        if held and held + counts[token] > most:
            found.append(token)
            held = 0
        held += int(counts[token])
    return tuple(found)


def _build_one(
    documents: Sequence[NDArray[np.uint32]],
    begins: Sequence[NDArray[np.uint32]],
    tokens: tuple[int, float],
    depth: int,
    folder: Path,
    number: int,
) -> int:
    """Write the trie of the keys that begin with ``tokens``, from the first to before the last; returns their number."""
    keys_file, counts_file = trie_files(number)
    # A trie is made of all its keys at once. Beside it they lie on disk.
    sorted_file = folder / "keys"
    occurred = _sort_keys(documents, begins, tokens, depth, sorted_file)
    # The weights order the branches, so that iteration meets frequent ones first.
    trie = marisa_trie.BinaryTrie(_keys(sorted_file, depth), weights=map(float, occurred))
    trie.save(str(folder / keys_file))
    counts = np.zeros(len(occurred), dtype="<u2")
    for key, count in zip(_keys(sorted_file, depth), np.minimum(occurred, _LARGEST_COUNT), strict=True):
        counts[trie.key_id(key)] = count
    counts.tofile(folder / counts_file)
    sorted_file.unlink()
    return len(occurred)


def _sort_keys(
    documents: Sequence[NDArray[np.uint32]],
    begins: Sequence[NDArray[np.uint32]],
    tokens: tuple[int, float],
    depth: int,
    file: Path,
) -> NDArray[np.int64]:
    """Write the different keys into ``file``, each as ``depth`` tokens: behind a document's end there is ``END``.

    Returns:
        How often each occurred, [keys].
    """
    starts = [np.flatnonzero((first >= tokens[0]) & (first < tokens[1])) for first in begins]
    rows = np.empty((sum(map(len, starts)), depth), dtype=">u4")
    filled = 0
    for document, own in zip(documents, starts, strict=True):
        if len(own):
            ended = np.concatenate([document, np.full(depth - 1, END, dtype=np.uint32)])
            rows[filled : filled + len(own)] = sliding_window_view(ended, depth)[own]
            filled += len(own)
    keys = rows.view(f"V{_TOKEN_BYTES * depth}").ravel()
    keys.sort()
    firsts = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), dtype=np.bool_), keys[1:] != keys[:-1]]))
    with file.open("wb") as out:
        for start in range(0, len(firsts), _AT_ONCE):
            out.write(keys[firsts[start : start + _AT_ONCE]].tobytes())
    return np.diff(firsts, append=len(keys))


def _keys(file: Path, depth: int) -> Iterator[bytes]:
    """The keys that ``_sort_keys`` has written."""
    width, ended = _TOKEN_BYTES * depth, END.to_bytes(_TOKEN_BYTES)
    with file.open("rb") as keys:
        while block := keys.read(width * _AT_ONCE):
            for start in range(0, len(block), width):
                key = block[start : start + width]
                while key.endswith(ended):
                    key = key[:-_TOKEN_BYTES]
                yield key


class NgramTrie:
    """Built tries, mapped into memory. Look-ups need no lock.

    Args:
        depth: longest key, in tokens.
        shards: ``Manifest.shards``.

    Raises:
        ConfigurationError: the files cannot be mapped, or do not belong together.
    """

    def __init__(self, folder: Path, depth: int, shards: Sequence[int]) -> None:
        self._depth = depth
        self._shards = shards
        self._parts = [_Part(folder, *trie_files(number)) for number in range(len(shards))]

    def __len__(self) -> int:
        return sum(len(part.trie) for part in self._parts)

    def look_up(self, suffix: Sequence[int], max_continuations: int, max_length: int) -> list[Continuation]:
        """What followed the longest suffix of ``suffix`` that is in the trie, with at most ``max_length`` tokens each.

        The matched suffix takes at most half of a key, so that the other half is left for the continuation.
        """
        for length in range(min(len(suffix), self._depth // 2), _SHORTEST_MATCH - 1, -1):
            part = self._parts[bisect_right(self._shards, suffix[-length]) - 1]
            prefix = np.asarray(suffix[-length:], dtype=">u4").tobytes()
            keys = list(islice(part.trie.iterkeys(prefix), max_continuations))
            found = _continuations(part, keys, len(prefix), max_length, length)
            if found:
                return found
        return []


class _Part:
    """One trie, and how often each of its keys occurred."""

    def __init__(self, folder: Path, keys: str, counts: str) -> None:
        self.trie = marisa_trie.BinaryTrie()
        try:
            self.trie.mmap(str(folder / keys))
            self.counts: NDArray[np.uint16] = np.memmap(folder / counts, dtype="<u2", mode="r")
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigurationError(f"cannot map the index in {folder}: {error}", about=folder) from error
        if len(self.counts) != len(self.trie) or not self.counts.all():
            raise ConfigurationError(
                f"{folder / counts} does not hold a count for each of the {len(self.trie)} n-grams", about=folder / counts
            )


def _continuations(part: _Part, keys: Sequence[bytes], skipped: int, max_length: int, length: int) -> list[Continuation]:
    end = skipped + _TOKEN_BYTES * max_length
    counted: dict[bytes, int] = {}
    for key in keys:
        rest = key[skipped:end]
        if rest:
            counted[rest] = counted.get(rest, 0) + int(part.counts[part.trie.key_id(key)])
    return [
        Continuation(tokens=tuple(np.frombuffer(rest, dtype=">u4").tolist()), count=count, match_length=length)
        for rest, count in counted.items()
    ]
