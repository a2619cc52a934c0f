"""The ways in which G4 and G5 pack the same rows: alone, in a prompt, and in trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.verifier.model.target_port import Rows

# Nodes of a bushy tree: with the row before them a pass of 64.
_BUSHY = 63


def rows_of(name: str, context: int, tokens: Sequence[int], parents: Sequence[int] = ()) -> Rows:
    """A request's rows, all of which are chosen after."""
    chosen = len(parents) + 1 if parents else len(tokens)
    return Rows(request_id=name, context=context, tokens=tuple(tokens), parents=tuple(parents), logits=chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTree:
    """A tree behind a position of a text, whose first path is what the text goes on with.

    Attributes:
        shown: of each row, the position of the text whose token it holds; its position in the request is another one, but
            on the path.
        path: the rows of the path, the position itself first.
    """

    start: int
    parents: tuple[int, ...]
    shown: tuple[int, ...]
    path: tuple[int, ...]


def tree(start: int, depth: int, others: int, length: int, seed: int) -> PackedTree:
    """A path of ``depth`` nodes, with up to ``others`` nodes on other paths before each, as ``seed`` has it."""
    source = random.Random(seed)
    parents: list[int] = []
    shown = [start]
    path: list[int] = []
    for step in range(depth):
        for _ in range(source.randint(0, others)):
            parents.append(source.randint(-1, len(parents) - 1))
            shown.append(source.randrange(length))
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
        shown.append(start + 1 + step)
    return PackedTree(start=start, parents=tuple(parents), shown=tuple(shown), path=(0, *(1 + node for node in path)))


def bushy_tree(start: int, depth: int, length: int, nodes: int = _BUSHY) -> PackedTree:
    """As ``tree``, as wide as it may be: every level has as many nodes, spread over those before, the path's the last."""
    parents: list[int] = []
    shown, path, before = [start], list[int](), [-1]
    for step in range(depth):
        level = range(len(parents), len(parents) + max(1, nodes // depth))
        parents += [before[place % len(before)] for place in range(len(level) - 1)] + [before[-1]]
        shown += [(start + 7 * node) % length for node in level[:-1]] + [start + 1 + step]
        path.append(level[-1])
        before = list(level)
    return PackedTree(start=start, parents=tuple(parents), shown=tuple(shown), path=(0, *(1 + node for node in path)))


def starts_of(length: int, depth: int) -> list[int]:
    """Where trees begin: so that they cross, touch and begin at borders of groups, tiles and segments, and at the end."""
    borders = [border for border in (16, 64, 128, 512, 1024) if border + depth < length]
    starts = {border + offset for border in borders for offset in (-depth // 2, -1, 0)} | {length - depth - 1}
    return sorted(start for start in starts if start > 0)
