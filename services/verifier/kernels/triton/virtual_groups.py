"""Where the rows of a tree find their ancestors: groups of 16 slots, several *copies* of a group of positions if need be.

A row's sums run over groups of 16 consecutive positions, and within a group the order does not matter (``tree_attend``). The
nodes of a tree at one group's positions may be more than 16, but a row sees at most 16 of them. So they are packed into
copies, such that every row finds all that it sees of the group in one of them. How they are packed changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from speculation.tree import ROOT

# Positions per group: the terms that one step of Hopper's matrix units adds.
GROUP = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualGroup:
    """One copy of a group of positions.

    Attributes:
        number: position // GROUP of all its slots.
        slots: at most GROUP slots of the request.
        positions: the position that each of them holds.
        masks: for every row of the request, bit i: it sees slot i. A row sees slots in one copy of a group only.
    """

    number: int
    slots: tuple[int, ...]
    positions: tuple[int, ...]
    masks: tuple[int, ...]


# As ``pack``.
Pack = Callable[[int, int, Sequence[int], int], list[list[VirtualGroup]]]


def pack(context: int, chain: int, parents: Sequence[int], tile: int) -> list[list[VirtualGroup]]:
    """The groups of each tile of positions in which the tree has nodes, by ascending position.

    Args:
        context, chain, parents: as in ``Rows``, with at least one parent.
        tile: number of positions per tile.
    """
    end = context + chain
    depths: list[int] = []
    # Of each node, the nodes that it sees as bits.
    paths: list[int] = []
    members: dict[int, int] = {}
    for node, parent in enumerate(parents):
        depths.append(0 if parent == ROOT else depths[parent] + 1)
        paths.append((0 if parent == ROOT else paths[parent]) | 1 << node)
        group = (end + depths[-1]) // GROUP
        members[group] = members.get(group, 0) | 1 << node
    positions = [end + depth for depth in depths]
    first, last = end // tile, max(positions) // tile
    tiles: list[list[VirtualGroup]] = []
    for number in range(first, last + 1):
        groups = range(number * tile // GROUP, (number + 1) * tile // GROUP)
        tiles.append([copy for group in groups for copy in _copies(group, context, chain, positions, paths, members)])
    return tiles


def _copies(
    group: int, context: int, chain: int, positions: Sequence[int], paths: Sequence[int], members: dict[int, int]
) -> list[VirtualGroup]:
    """The copies of one group: each holds the group's committed slots, then nodes."""
    begin, end = group * GROUP, context + chain
    committed = min(max(0, end - begin), GROUP)
    inside = members.get(group, 0)
    if not committed and not inside:
        return []
    # Rows of the chain see committed slots up to their own, in the first copy.
    before = [(1 << min(max(0, position + 1 - begin), committed)) - 1 for position in range(context, end)]
    made = []
    for number, (copy, seen_by) in enumerate(_packed(inside, GROUP - committed, positions, paths)):
        nodes = _bits(copy)
        lanes = {1 << node: 1 << committed + lane for lane, node in enumerate(nodes)}
        # By what is seen of the copy; most rows see what another one does, and one node more.
        masks_of = {0: (1 << committed) - 1}
        masks = list(before) if number == 0 else [0] * len(before)
        masks += [0 if seen is None else _mask(seen, lanes, masks_of) for seen in seen_by]
        made.append(
            VirtualGroup(
                number=group,
                slots=(*range(begin, begin + committed), *(end + node for node in nodes)),
                positions=(*range(begin, begin + committed), *(positions[node] for node in nodes)),
                masks=tuple(masks),
            )
        )
    return made


def _packed(inside: int, room: int, positions: Sequence[int], paths: Sequence[int]) -> list[tuple[int, list[int | None]]]:
    """Copies of the nodes ``inside`` a group, at most ``room`` of them in each; nodes are bits.

    Returns:
        The nodes of each copy, and what every node sees of it; None: it finds what it sees in another copy.
    """
    if inside.bit_count() <= room:
        return [(inside, [path & inside for path in paths])]
    copies: list[int] = []
    seen_by: list[list[int | None]] = []
    # The deepest nodes first: what their ancestors see is a part of what they see.
    for node in sorted(range(len(paths)), key=lambda node: -positions[node]):
        seen = paths[node] & inside
        found = next((at for at, copy in enumerate(copies) if (copy | seen).bit_count() <= room), len(copies))
        if found == len(copies):
            copies.append(0)
            seen_by.append([None] * len(paths))
        copies[found] |= seen
        seen_by[found][node] = seen
    return list(zip(copies, seen_by, strict=True))


def _mask(seen: int, lanes: Mapping[int, int], known: dict[int, int]) -> int:
    """The lanes of the nodes ``seen``, and the committed ones; those ``known`` by what is seen grow."""
    if seen not in known:
        last = 1 << seen.bit_length() - 1
        known[seen] = _mask(seen ^ last, lanes, known) | lanes[last]
    return known[seen]


def _bits(number: int) -> list[int]:
    """The numbers of the bits that are set, ascending."""
    found = []
    while number:
        found.append((number & -number).bit_length() - 1)
        number &= number - 1
    return found
