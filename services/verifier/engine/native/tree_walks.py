"""The tokens that a pass commits, of all requests in one call: compiled code follows the target's choices; see walks.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

from services.verifier.engine.native.library import engine_library
from services.verifier.model.target_port import NOT_CHOSEN
from speculation.acceptance import StopRule, walk
from speculation.types import FinishReason, TokenTree

# As in walks.h: the token of a node that cannot be accepted, the numbers of a ``walked``, and by its end why an answer ends.
_PROBE = -2
_WALKED = 3
_REASONS = (None, FinishReason.STOP, FinishReason.LENGTH, None)

# Accepted nodes, committed tokens, and why the answer ends; no token: nothing was chosen after a row that the walk reaches.
Decided = tuple[tuple[int, ...], tuple[int, ...], FinishReason | None]


def walk_all(
    trees: Sequence[TokenTree], choices: Sequence[Sequence[int]], left: Sequence[int], stops: Sequence[array[int]]
) -> list[Decided]:
    """What ``speculation.acceptance.walk`` accepts, for every request of a pass.

    Args:
        choices: of each tree, the target's own token after the pending one and after each node; see ``Outcome.choices``.
        left: how many tokens each answer may still have.
        stops: the tokens that end each answer, as int32.
    """
    library = engine_library()
    if library is None:
        return walk_each(trees, choices, left, stops)
    return _walk_compiled(library, trees, choices, left, stops)


def walk_each(
    trees: Sequence[TokenTree], choices: Sequence[Sequence[int]], left: Sequence[int], stops: Sequence[array[int]]
) -> list[Decided]:
    """The same by the reference, where nothing can be compiled."""
    return [_walk_one(*each) for each in zip(trees, choices, left, stops, strict=True)]


class _NothingChosenError(Exception):
    """A row that the walk reaches has no choice."""


def _walk_one(tree: TokenTree, choices: Sequence[int], left: int, stops: array[int]) -> Decided:
    def choose_at(node: int) -> int:
        if choices[node + 1] == NOT_CHOSEN:
            raise _NothingChosenError
        return choices[node + 1]

    try:
        found = walk(tree, choose_at, StopRule(stop_token_ids=frozenset(stops), generated=0, room=left))
    except _NothingChosenError:
        return (), (), None
    return found.path, found.tokens, found.finish_reason


def _walk_compiled(
    library: ctypes.PyDLL,
    trees: Sequence[TokenTree],
    choices: Sequence[Sequence[int]],
    left: Sequence[int],
    stops: Sequence[array[int]],
) -> list[Decided]:
    sizes = [len(tree.tokens) for tree in trees]
    if [len(each) - 1 for each in choices] != sizes:
        raise ValueError("there must be a choice after each pending token and after each node")
    ends = [ids.buffer_info() for ids in stops]
    answers = array(
        "q", [number for size, most, end in zip(sizes, left, ends, strict=True) for number in (size, most, *end)]
    )
    tokens, parents = _nodes(trees)
    chosen = array("i", chain.from_iterable(choices))
    path, committed = array("i", bytes(4 * len(tokens))), array("i", bytes(4 * len(chosen)))
    found = array("i", bytes(4 * _WALKED * len(trees)))
    columns = (answers, tokens, parents, chosen, path, committed, found)
    address, *others = [column.buffer_info()[0] for column in columns]
    library.walks_follow(address, len(trees), *others)
    decided: list[Decided] = []
    first = 0
    for number, size in enumerate(sizes):
        accepted, count, end = found[_WALKED * number : _WALKED * (number + 1)]
        # Of each tree there is one choice more than nodes.
        begin = first + number
        accepted_path = tuple(path[first : first + accepted]) if accepted else ()
        decided.append((accepted_path, tuple(committed[begin : begin + count]), _REASONS[end]))
        first += size
    return decided


def _nodes(trees: Sequence[TokenTree]) -> tuple[array[int], array[int]]:
    """Tokens and parents of all trees; a probe has a token that nothing chooses."""
    tokens = array("i", chain.from_iterable([tree.tokens for tree in trees]))
    parents = array("i", chain.from_iterable([tree.parents for tree in trees]))
    first = 0
    for tree in trees:
        for probe in tree.probes:
            tokens[first + probe] = _PROBE
        first += len(tree.tokens)
    return tokens, parents
