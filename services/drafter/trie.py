"""How often each stretch of some texts occurred, and what came next: a trie whose single occurrences are not spelled out.

A stretch that occurred once is a leaf, a position in its text, from where the text itself says how it goes on. Only what
occurred again gets a node, so a token costs one or two entries, not as many as the longest stretch has tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter


class Node:
    """A stretch that occurred ``count`` times; ``next`` holds what followed it, each followed stretch a node or a leaf."""

    __slots__ = ("count", "next")

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.next: dict[int, Stretch] = {}


# A text, and the position behind the one occurrence.
Leaf = tuple[Sequence[int], int]
Stretch = Node | Leaf


def add(root: Node, text: Sequence[int], depth: int) -> None:
    """Count every stretch of at most ``depth`` tokens of a text, which must not change."""
    for start in range(len(text)):
        node = root
        for end, token in enumerate(text[start : start + depth], start + 1):
            child = node.next.get(token)
            if child is None:
                node.next[token] = (text, end)
                break
            node = again(node, token, child, deepest=end - start == depth)


def remove(root: Node, text: Sequence[int], depth: int) -> None:
    """Take back what ``add`` counted."""
    for start in range(len(text)):
        node = root
        for token in text[start : start + depth]:
            child = node.next[token]
            if not isinstance(child, Node) or child.count == 1:
                del node.next[token]
                break
            child.count -= 1
            node = child


def again(node: Node, token: int, child: Stretch, *, deepest: bool) -> Node:
    """Count one more occurrence of ``child``, which follows ``node`` by ``token``; gives its node.

    Args:
        deepest: nothing that follows it is counted.
    """
    if not isinstance(child, Node):
        text, end = child
        child = node.next[token] = Node(1)
        if end < len(text) and not deepest:
            child.next[text[end]] = (text, end + 1)
    child.count += 1
    return child


def follow(stretch: Stretch, token: int) -> Stretch | None:
    """The stretch one token longer, if it occurred."""
    if isinstance(stretch, Node):
        return stretch.next.get(token)
    text, end = stretch
    return (text, end + 1) if end < len(text) and text[end] == token else None


def followers(stretch: Stretch, most: int) -> list[tuple[int, int, int]]:
    """What came next, the likeliest ``most``: token, how often it followed, how often anything did."""
    if not isinstance(stretch, Node):
        text, end = stretch
        return [(text[end], 1, 1)] if end < len(text) else []
    below = [(token, child.count if isinstance(child, Node) else 1) for token, child in stretch.next.items()]
    total = sum(count for _, count in below)
    if len(below) > 1:
        below = heapq.nlargest(most, below, key=itemgetter(1))
    return [(token, count, total) for token, count in below]
