"""A draft at hand, and what is still of use of it after a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculation.messages import Draft
from speculation.records import maker, quickly_made
from speculation.tree import descend, follow_on
from speculation.types import TokenTree


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyDraft:
    """The usable part of a draft: its whole tree, or the subtree below the tokens committed meanwhile.

    Attributes:
        late: whether it is only a subtree, because the draft came late.
        asked: whether the draft was asked for.
        at: arrival time, in seconds of the event loop's clock.
    """

    draft: Draft
    tree: TokenTree
    late: bool
    asked: bool
    at: float


make_ready = maker(ReadyDraft)


def rated(tree: TokenTree, since: Sequence[int]) -> tuple[int, bool]:
    """How many tokens a draft had right, and whether it has a ``remainder``."""
    right, left = follow_on(tree, since)
    return right, left and not tree.proposals


def remainder(tree: TokenTree, since: Sequence[int]) -> TokenTree | None:
    """The part of a late draft after the tokens committed meanwhile; None if there is none.

    A sampled tree has none: a subtree selected by committed tokens would bias rejection sampling.
    """
    return None if tree.proposals else descend(tree, since) or None
