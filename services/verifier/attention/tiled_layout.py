"""The layout of one pass: where its rows are stored, and which keys each of them sees.

Every row sees its own request's positions up to its own, and sums them up in an order that depends on its position alone:
tile by tile, first the whole tiles before its own (the *head*), then its own. Within a tile, the sum runs over the positions
from first to last. So a token's attention is the same sum in the same order, bit for bit, whether it is prefilled, decoded
alone or checked in a tree.

The nodes of a tree are stored after the committed tokens, in the order of the tree. The rows of one request that share a
tile form a group and read a common *window* of slots, from the beginning of that tile to the end of the tree. A node sees
only its ancestors there, which come in the order of their positions; the other slots have weight zero and change no sum.
Where a tree crosses the border of a tile, a node's sum is split as well: each *segment* holds one tile of positions.

Groups of similar size are stacked into *buckets*, so that a layer takes a few large products, however many requests there
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.attention.calls import TILE
from services.verifier.attention.stream_layout import streams_last
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from speculation.tree import ROOT

Index = slice | torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The whole tiles before the windows of a bucket's groups, as pairs (group, tile), group by group.

    Attributes:
        chunks: the pairs that are computed together, as (groups, the pool's blocks), each [pairs].
        groups: [pairs], the group of every pair.
        first_positions: [pairs], the position in the request at which the tile begins.
        steps: the pairs of every group's first tile, then those of the second tiles, ..., as (groups, pairs).
    """

    chunks: tuple[tuple[Index, Index], ...]
    groups: torch.Tensor
    first_positions: torch.Tensor
    steps: tuple[tuple[Index, Index], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Groups of rows, padded to the same number of rows and window tiles.

    Attributes:
        rows: [groups, rows], indices in the pass; padding is row 0.
        positions: [groups, rows], positions in the request.
        window: the pool's blocks of the windows, one group after the other.
        slot_positions: [groups, slots], the position that each slot of the window holds.
        segments: [segments, groups, rows, slots], which slots a row sees. Padding rows see slot 0.
        heads: None if no group has a whole tile before its window.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    window: Index
    slot_positions: torch.Tensor
    segments: torch.Tensor
    heads: Heads | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of one forward pass.

    Attributes:
        positions: [rows], the position of each row in its request.
        blocks: [rows], the pool's block for each row's key and value.
        offsets: [rows], the slot within that block.
        source: [rows], the index of each row's result among those of all buckets.
    """

    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    buckets: tuple[Bucket, ...]
    source: torch.Tensor


@dataclass(kw_only=True, slots=True)
class _Group:
    """Rows of one request that share a tile, the first of them at pass row ``first``."""

    first: int
    positions: list[int]
    owned: list[int]
    tile: int
    window: list[int]
    # [rows, slots] and [slots].
    sees: NDArray[np.bool_]
    slot_positions: NDArray[np.int64]


def lay_out(pool: KVPool, batch: Sequence[Rows], padding: int, stream_rows: Sequence[int] | None = None) -> Layout:
    """Lay out ``batch``, followed by ``padding`` rows that belong to no request.

    Args:
        stream_rows: of each entry, the number of its stream rows, its last rows: they are put behind all others.
    """
    positions: list[int] = []
    blocks: list[int] = []
    offsets: list[int] = []
    groups: list[_Group] = []
    for rows in batch:
        owned = pool.blocks_of(rows.request_id)
        own_positions = _positions(rows)
        groups += _groups(rows, own_positions, owned, len(positions))
        slots = range(rows.context, rows.context + len(rows.tokens))
        blocks += [owned[slot // TILE] for slot in slots]
        offsets += [slot % TILE for slot in slots]
        positions += own_positions
    buckets, source = _buckets(pool, groups, len(positions) + padding)
    device = pool.device
    layout = Layout(
        positions=torch.tensor(positions + [0] * padding, device=device),
        blocks=torch.tensor(blocks + [pool.padding_block] * padding, device=device),
        offsets=torch.tensor(offsets + [0] * padding, device=device),
        buckets=buckets,
        source=torch.tensor(source, device=device),
    )
    return layout if stream_rows is None else _reordered(layout, streams_last(batch, padding, stream_rows))


def _reordered(layout: Layout, order: Sequence[int]) -> Layout:
    """The same with the rows of these numbers at places 0, 1, ..."""
    at = torch.tensor(order, device=layout.positions.device)
    places = torch.empty_like(at)
    places[at] = torch.arange(len(order), device=at.device)
    return Layout(
        positions=layout.positions[at],
        blocks=layout.blocks[at],
        offsets=layout.offsets[at],
        buckets=tuple(replace(bucket, rows=places[bucket.rows]) for bucket in layout.buckets),
        source=layout.source[at],
    )


def _positions(rows: Rows) -> list[int]:
    positions = list(range(rows.context, rows.context + rows.chain))
    for parent in rows.parents:
        positions.append(positions[rows.chain + parent] + 1)
    return positions


def _groups(rows: Rows, positions: list[int], owned: list[int], start: int) -> list[_Group]:
    """The chain, cut at the borders of tiles; the tree belongs to the last piece."""
    groups = []
    end = rows.context + rows.chain
    for tile, members in groupby(range(rows.context, end), key=lambda position: position // TILE):
        chain = len(list(members))
        first = max(rows.context, tile * TILE)
        parents = rows.parents if first + chain == end else ()
        slots = -(-(first + chain + len(parents) - tile * TILE) // TILE) * TILE
        sees = _sight(first - tile * TILE, chain, parents, slots)
        at = first - rows.context
        own = positions[at : at + chain + len(parents)]
        slot_positions = np.arange(tile * TILE, tile * TILE + slots)
        slot_positions[end - tile * TILE : end - tile * TILE + len(parents)] = own[chain:]
        groups.append(
            _Group(
                first=start + at,
                positions=own,
                owned=owned,
                tile=tile,
                window=owned[tile : tile + slots // TILE],
                sees=sees,
                slot_positions=slot_positions,
            )
        )
    return groups


def _sight(before: int, chain: int, parents: Sequence[int], slots: int) -> NDArray[np.bool_]:
    """[chain + nodes, slots]: every row sees itself, its ancestors, and the ``before`` slots before the chain."""
    sees = np.tri(chain + len(parents), slots, before, dtype=np.bool_)
    committed = before + chain
    for node, parent in enumerate(parents):
        row = chain + node
        sees[row] = sees[chain - 1 if parent == ROOT else chain + parent]
        sees[row, committed + node] = True
    return sees


def _buckets(pool: KVPool, groups: list[_Group], rows: int) -> tuple[tuple[Bucket, ...], list[int]]:
    """Stack groups into buckets. Returns these, and for every row of the pass the index of its result."""
    stacked: dict[tuple[int, int], list[_Group]] = {}
    for group in groups:
        # A single group needs no padding to match others.
        size = len(group.positions) if len(groups) == 1 else 1 << (len(group.positions) - 1).bit_length()
        stacked.setdefault((size, len(group.window)), []).append(group)
    buckets = []
    source = [0] * rows
    done = 0
    for (size, _), members in stacked.items():
        for index, group in enumerate(members):
            at = done + index * size
            source[group.first : group.first + len(group.positions)] = range(at, at + len(group.positions))
        done += size * len(members)
        buckets.append(_bucket(pool, members, size))
    return tuple(buckets), source


def _bucket(pool: KVPool, members: list[_Group], size: int) -> Bucket:
    slots = len(members[0].slot_positions)
    rows = np.zeros((len(members), size), dtype=np.int64)
    positions = np.zeros((len(members), size), dtype=np.int64)
    sees = np.zeros((len(members), size, slots), dtype=np.bool_)
    sees[:, :, 0] = True
    slot_positions = np.stack([group.slot_positions for group in members])
    for index, group in enumerate(members):
        count = len(group.positions)
        rows[index, :count] = range(group.first, group.first + count)
        positions[index, :count] = group.positions
        sees[index, :count] = group.sees
    first_tiles = np.array([group.tile for group in members])
    tile_of_slot = slot_positions // TILE - first_tiles[:, None]
    last = max(max(group.positions) // TILE - group.tile for group in members)
    segments = np.stack([sees & (tile_of_slot == number)[:, None] for number in range(last + 1)])
    device = pool.device
    return Bucket(
        rows=torch.from_numpy(rows).to(device),
        positions=torch.from_numpy(positions).to(device),
        window=_index([block for group in members for block in group.window], device),
        slot_positions=torch.from_numpy(slot_positions).to(device),
        segments=torch.from_numpy(segments).to(device),
        heads=_heads(members, device),
    )


# A head of at least so many tiles gets a product of its own, and is read in place if its blocks are neighbours. Shorter
# heads are copied together, which costs less than a product for each.
_LONG = 4


def _heads(members: list[_Group], device: torch.device) -> Heads | None:
    order = sorted(range(len(members)), key=lambda index: members[index].tile >= _LONG)
    groups = [index for index in order for _ in range(members[index].tile)]
    if not groups:
        return None
    blocks = [block for index in order for block in members[index].owned[: members[index].tile]]
    cuts = [sum(members[index].tile for index in order if members[index].tile < _LONG)]
    for index in order:
        if members[index].tile >= _LONG:
            cuts.append(cuts[-1] + members[index].tile)
    spans = [(a, b) for a, b in zip([0, *cuts], cuts, strict=False) if b > a]
    steps: list[tuple[list[int], list[int]]] = []
    counts: dict[int, int] = {}
    for pair, group in enumerate(groups):
        step = counts.get(group, 0)
        counts[group] = step + 1
        if step == len(steps):
            steps.append(([], []))
        steps[step][0].append(group)
        steps[step][1].append(pair)
    return Heads(
        chunks=tuple((_index(groups[a:b], device), _index(blocks[a:b], device)) for a, b in spans),
        groups=torch.tensor(groups, device=device),
        first_positions=torch.tensor([TILE * tile for index in order for tile in range(members[index].tile)], device=device),
        steps=tuple((_index(of, device), _index(pairs, device)) for of, pairs in steps),
    )


def _index(numbers: list[int], device: torch.device) -> Index:
    """A slice if ``numbers`` are consecutive, else a tensor."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, device=device)
