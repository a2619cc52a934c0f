"""Trees of a message by columns, as step reports observe them and drafts bring them (tree.proto)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from outrider.internal.v1 import tree_pb2
from services.links.codec.checks import check_size
from services.links.codec.packed import cut, joined, packed, small, unpacked
from speculation import limits
from speculation.errors import MalformedTree
from speculation.records import maker
from speculation.types import EMPTY_TREE, TokenTree

_make_tree = maker(TokenTree)


class _Names(NamedTuple):
    """The names of all sources of a message, the longest of them, and whether no tree of the message breaks a limit."""

    all: tuple[str, ...]
    longest: int
    sound: bool


# A tree's tokens, parents, indices of sources and scores, and the names of all sources.
Nodes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[float, ...], _Names]


class _Trees(NamedTuple):
    """The columns of ``TokenTrees``; ``signed``: all but scores are numbers with a sign."""

    counts: array[int]
    tokens: array[int]
    parents: array[int]
    sources: array[int]
    scores: array[float]
    score_counts: array[int]
    names: _Names
    signed: bool


def write_trees(trees: Sequence[TokenTree], made: tree_pb2.TokenTrees) -> None:
    """Encode trees without probes and proposals into an empty message."""
    sources = [*joined([tree.sources for tree in trees])]
    number = {name: at for at, name in enumerate(dict.fromkeys(sources))}
    made.counts = packed("I", [len(tree.tokens) for tree in trees])
    made.tokens = packed("I", joined([tree.tokens for tree in trees]))
    made.parents = packed("i", joined([tree.parents for tree in trees]))
    made.sources = packed("I", map(number.__getitem__, sources))
    made.source_names.extend(number)
    made.scores = packed("f", joined([tree.scores for tree in trees]))
    made.score_counts = packed("I", [len(tree.scores) for tree in trees])


def unpacked_trees(name: str, wire: tree_pb2.TokenTrees) -> _Trees:
    """The columns of a message's trees. As compiled code reads them, numbers have a sign where all are ``small``.

    Raises:
        InvalidArgument: see ``unpacked``.
    """
    told = wire.counts, wire.tokens, wire.sources, wire.score_counts
    signed = all(map(small, told))
    kind = "i" if signed else "I"
    counts, tokens, sources, score_counts = (unpacked(name, kind, each) for each in told)
    names = _names(tuple(wire.source_names[:]), counts, score_counts, sources)
    parents, scores = unpacked(name, "i", wire.parents), unpacked(name, "f", wire.scores)
    return _Trees(counts, tokens, parents, sources, scores, score_counts, names, signed)


def _names(told: tuple[str, ...], counts: Sequence[int], score_counts: Sequence[int], sources: Sequence[int]) -> _Names:
    longest = max(map(len, told), default=0)
    most, last = max((*counts, *score_counts), default=0), max(sources, default=-1)
    few = len(told) <= limits.MAX_SOURCES * len(counts) and longest <= limits.MAX_SOURCE_NAME
    return _Names(told, longest, most <= limits.MAX_TREE_NODES and last < len(told) and few)


def trees_of(name: str, wire: tree_pb2.TokenTrees) -> list[Nodes]:
    """The trees of a message, each by itself.

    Raises:
        InvalidArgument: its columns do not fit together, or it names too many sources.
    """
    held = unpacked_trees(name, wire)
    check_size(f"{name}.source_names", len(held.names.all), limits.MAX_SOURCES * len(held.counts))
    return [
        (*columns, held.names)
        for columns in zip(
            cut(f"{name}.tokens", held.tokens, held.counts),
            cut(f"{name}.parents", held.parents, held.counts),
            cut(f"{name}.sources", held.sources, held.counts),
            cut(f"{name}.scores", held.scores, held.score_counts),
            strict=False,
        )
    ]


def tree_of(
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    sources: tuple[int, ...],
    scores: tuple[float, ...],
    names: _Names,
) -> TokenTree:
    """As ``trees.decode_tree``, of a tree in columns."""
    if not tokens:
        return EMPTY_TREE
    if not names.sound:
        _refuse_beyond(tokens, sources, scores, names)
    named = names.all
    return _make_tree(tokens=tokens, parents=parents, sources=tuple([named[each] for each in sources]), scores=scores)


def _refuse_beyond(tokens: Sequence[int], sources: Sequence[int], scores: Sequence[float], names: _Names) -> None:
    """Of a message with a tree that breaks a limit: raise if it is this one."""
    if max(len(tokens), len(scores)) > limits.MAX_TREE_NODES:
        raise MalformedTree("tree.tokens", f"{max(len(tokens), len(scores))} entries", f"at most {limits.MAX_TREE_NODES}")
    if max(sources) >= len(names.all):
        raise MalformedTree("tree.sources", max(sources), f"below {len(names.all)}")
    if len(longest := max([names.all[each] for each in sources], key=len)) > limits.MAX_SOURCE_NAME:
        raise MalformedTree("tree.source_names", longest, f"names of at most {limits.MAX_SOURCE_NAME} characters")
