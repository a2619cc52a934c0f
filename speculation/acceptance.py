"""The acceptance walk: how many drafted tokens the target would have chosen itself.

Glossary: the *pending* token is the last committed one; its key and value are not computed yet, and it is the tree's root.
*Accepted* tokens are nodes whose token is the target's choice. The *bonus* token is the target's choice after the last
accepted node: every pass yields one, so a pass over an empty tree is plain decoding.

The choice at a node depends on its path, the seed and the position, never on the tree's other nodes. This is the whole
proof of losslessness: a tree decides how many of the target's tokens one pass yields, not which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from speculation.records import maker, quickly_made
from speculation.tree import ROOT, children
from speculation.types import FinishReason, SamplingParams, TokenTree


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """The tokens that a pass commits: those of ``path``, then the bonus token unless generation ended within the path."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None


_make_accepted = maker(Accepted)


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """Decides when generation ends. It is asked after every token, so that nothing beyond the end is committed.

    Attributes:
        stop_token_ids: tokens that end generation, including the model's own unless they are ignored.
        generated: tokens of the answer so far.
        room: most tokens that the answer may have: max_tokens, or fewer if the context leaves fewer.
    """

    stop_token_ids: frozenset[int]
    generated: int
    room: int

    def after(self, tokens: list[int]) -> FinishReason | None:
        """Why generation ends with the last of ``tokens``, which follow the answer so far; None if it goes on."""
        return reason_to_end(tokens[-1], self.generated + len(tokens), self.stop_token_ids, self.room)


def reason_to_end(last: int, length: int, stop_token_ids: Collection[int], room: int) -> FinishReason | None:
    """Why an answer of ``length`` tokens ends with its token ``last``; None if it goes on. ``room`` as in ``StopRule``."""
    if last in stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= room else None


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """All tokens that end an answer under ``params``."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)


# Takes a node, its children, and how many tokens were decided before; gives the accepted child, if any, and the token.
Decide = Callable[[int, list[int], int], tuple[int | None, int]]


def walk(tree: TokenTree, choose_at: Callable[[int], int], stop: StopRule) -> Accepted:
    """Follow the target's choices down the tree.

    With noise keyed by position this is the coupling of Daliri, Musco and Suresh (arXiv 2408.07978), applied to trees.

    Drafted is 7, then 8, then 9 or 5. Say the target chooses 7 after the pending token, 8 after that, then 5, then 2:

    >>> tree = TokenTree(tokens=(7, 8, 9, 5), parents=(ROOT, 0, 1, 1), sources=("suffix",) * 4)
    >>> choices = {ROOT: 7, 0: 8, 1: 5, 3: 2}
    >>> stop = StopRule(stop_token_ids=frozenset(), generated=0, room=100)
    >>> walk(tree, choices.__getitem__, stop)
    Accepted(path=(0, 1, 3), tokens=(7, 8, 5, 2), finish_reason=None)

    One pass yields four tokens: three accepted ones, and the bonus token 2. A draft that is all wrong still yields one, the
    token that plain decoding would have yielded:

    >>> walk(tree, {ROOT: 6}.__getitem__, stop)
    Accepted(path=(), tokens=(6,), finish_reason=None)

    Nothing follows a token that ends the answer:

    >>> ended = walk(tree, choices.__getitem__, StopRule(stop_token_ids=frozenset({8}), generated=0, room=100))
    >>> ended.tokens, ended.finish_reason.name
    ((7, 8), 'STOP')

    Args:
        choose_at: the target's choice after a node (``ROOT``: after the pending token). Called for visited nodes only.
    """
    held, parents, probes = tree.tokens, tree.parents, tree.probes
    node: int | None = ROOT
    path: list[int] = []
    tokens: list[int] = []
    finish, length = None, stop.generated
    while node is not None and finish is None:
        token, above, node = choose_at(node), node, None
        # As ``child_with``, which would be called for each token of each request.
        for child in range(above + 1, len(held)):
            if parents[child] == above and held[child] == token and child not in probes:
                node = child
                path.append(child)
                break
        tokens.append(token)
        length += 1
        finish = reason_to_end(token, length, stop.stop_token_ids, stop.room)
    return _make_accepted(path=tuple(path), tokens=tuple(tokens), finish_reason=finish)


def decided_path(tree: TokenTree, decide: Decide, stop: StopRule) -> Accepted:
    """Go down the tree from child to accepted child; the token after the last one ends the pass."""
    below = children(tree)
    node: int | None = ROOT
    path: list[int] = []
    tokens: list[int] = []
    finish = None
    while node is not None and finish is None:
        node, token = decide(node, below.get(node, []), len(tokens))
        path += [] if node is None else [node]
        tokens.append(token)
        finish = stop.after(tokens)
    return Accepted(path=tuple(path), tokens=tuple(tokens), finish_reason=finish)
