"""What the tokens that a step commits change, for many requests in one call; see commits.c."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from services.machine.held_memory import Held
from services.verifier.engine.deciding.repetition import READ, REMEMBERED, Repetition
from services.verifier.engine.native.library import engine_library
from speculation.arrays import array_of
from speculation.types import TokenTree

# The struct commits in commits.h, and the bits of its marks.
_COMMITS = struct.Struct("q9P")
_REMAINS, _BEGINS = 1, 2


class CompiledRepetition(Held):
    """As ``Repetition``. ``commit_together`` adds to many."""

    def __init__(self, library: ctypes.PyDLL, tokens: Sequence[int]) -> None:
        super().__init__(library.repetition_new(REMEMBERED), library.repetition_free)
        self.begins = False
        self._commit = library.repetition_commit
        self.commit(tokens[-READ:])

    def commit(self, tokens: Sequence[int]) -> None:
        held = array("i", tokens)
        self.begins = bool(self._commit(self.address, *held.buffer_info()))


def repetition_of(tokens: Sequence[int]) -> Repetition | CompiledRepetition:
    """What notices that a text repeats itself, compiled where that is possible."""
    library = engine_library()
    return Repetition(tokens) if library is None else CompiledRepetition(library, tokens)


class Commits(NamedTuple):
    """What became of each request.

    Attributes:
        hashes: of the prefixes, with the tokens.
        right, remain: what ``follow_on`` says of its draft.
        begin: what ``Repetition.begins`` says of its text.
    """

    hashes: list[int]
    right: list[int]
    remain: list[bool]
    begin: list[bool]


def commit_together(
    committed: Sequence[Sequence[int]],
    trees: Sequence[TokenTree],
    texts: Sequence[CompiledRepetition],
    hashes: Sequence[int],
) -> Commits:
    """Add each request's tokens to its text and to the hash of its prefix, and compare its draft with them.

    Args:
        trees: the drafts, without probes; empty where a request has none.
    """
    library, count = engine_library(), len(committed)
    assert library is not None, "texts are compiled"
    right, marks, found = array("i", bytes(4 * count)), array("B", bytes(count)), array("Q", hashes)
    held = (
        array_of("i", map(len, committed)),
        array_of("i", chain.from_iterable(committed)),
        array_of("i", [len(tree.tokens) for tree in trees]),
        array_of("i", chain.from_iterable([tree.tokens for tree in trees])),
        array_of("i", chain.from_iterable([tree.parents for tree in trees])),
        array("Q", [text.address for text in texts]),
        found,
        right,
        marks,
    )
    told = _COMMITS.pack(count, *[each.buffer_info()[0] for each in held])
    library.commits_take(told)
    return Commits(
        found.tolist(), right.tolist(), [mark & _REMAINS != 0 for mark in marks], [mark & _BEGINS != 0 for mark in marks]
    )
