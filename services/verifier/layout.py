"""Where the rows of one pass lie, and which keys each of them sees.

Every row sees its own request's positions up to its own. They are read in an order that depends on the row's position
alone: first the *head*, all whole tiles of ``TILE`` positions before the row's own tile, then the *tail*, the row's own
tile. A tree node's ancestors stand in its tail at their positions, as if they had been committed. So a token's attention is
the same sum in the same order, bit for bit, whether it is prefilled, decoded alone or checked among other drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from services.verifier.kv_pool import KVPool
from speculation.ports import Rows
from speculation.tree import ROOT

TILE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows of one request that share a tile.

    Attributes:
        rows: index of them in the pass.
        positions: [rows], in the request.
        head: index of the head's rows in the pool; None if the tile is the first.
        tail: index of the tile's rows in the pool: one window for all rows, or [rows, TILE], one list for each.
        visible: [rows, TILE], which of its tail's keys each row sees.
    """

    rows: slice | torch.Tensor
    positions: torch.Tensor
    head: slice | torch.Tensor | None
    tail: slice | torch.Tensor
    visible: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one forward pass needs besides its token ids.

    Attributes:
        positions: [rows], of each row in its own request.
        slots: [rows], where in the pool each row's key and value go.
    """

    pool: KVPool
    positions: torch.Tensor
    slots: torch.Tensor
    groups: tuple[Group, ...]


def lay_out(pool: KVPool, batch: Sequence[Rows], padding: int) -> Pass:
    """Lay out ``batch``, followed by ``padding`` rows that belong to nobody and see nothing."""
    positions: list[int] = []
    slots: list[torch.Tensor] = []
    groups: list[Group] = []
    for rows in batch:
        groups += _chain_groups(pool, rows, len(positions))
        groups += _tree_groups(pool, rows, len(positions) + rows.chain)
        slots.append(pool.rows_of(rows.session_id)[rows.context : rows.context + len(rows.tokens)])
        positions += _positions(rows)
    slots.append(torch.full((padding,), pool.padding_row, dtype=torch.long, device=pool.device))
    return Pass(
        pool=pool,
        positions=torch.tensor(positions + [0] * padding, device=pool.device),
        slots=torch.cat(slots),
        groups=tuple(groups),
    )


def _positions(rows: Rows) -> list[int]:
    positions = list(range(rows.context, rows.context + rows.chain))
    for parent in rows.parents:
        positions.append(positions[rows.chain + parent] + 1)
    return positions


def _chain_groups(pool: KVPool, rows: Rows, start: int) -> list[Group]:
    """The chain, cut at tile borders; each piece reads its tile straight from the pool."""
    groups = []
    for tile, members in groupby(range(rows.context, rows.context + rows.chain), key=lambda position: position // TILE):
        positions = torch.tensor(list(members))
        first = start + int(positions[0]) - rows.context
        groups.append(
            Group(
                rows=slice(first, first + len(positions)),
                head=pool.window(rows.session_id, 0, tile * TILE) if tile else None,
                tail=_tail_window(pool, rows.session_id, tile),
                **_sight(pool, positions, tile),
            )
        )
    return groups


def _tail_window(pool: KVPool, owner: str, tile: int) -> slice | torch.Tensor:
    """A tile's rows. Where the request owns less than the whole tile, the padding row fills up."""
    owned = pool.rows_of(owner)[tile * TILE : (tile + 1) * TILE]
    if len(owned) == TILE:
        return pool.window(owner, tile * TILE, (tile + 1) * TILE)
    return torch.cat([owned, owned.new_full((TILE - len(owned),), pool.padding_row)])


def _tree_groups(pool: KVPool, rows: Rows, start: int) -> list[Group]:
    """The nodes, by tile and by the ancestors that lie before it; each node has its own list of keys."""
    end = rows.context + rows.chain
    paths: list[tuple[int, ...]] = []
    members: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for node, parent in enumerate(rows.parents):
        paths.append((*(paths[parent] if parent != ROOT else ()), node))
        tile = (end + len(paths[node]) - 1) // TILE
        members.setdefault((tile, paths[node][: max(0, tile * TILE - end)]), []).append(node)
    owned = pool.rows_of(rows.session_id)
    groups = []
    for (tile, before), nodes in members.items():
        base = tile * TILE
        tail = owned.new_full((len(nodes), TILE), pool.padding_row)
        for row, node in enumerate(nodes):
            own_path = [end + ancestor for ancestor in paths[node][len(before) :]]
            keys = torch.cat([owned[base:end], owned[own_path]])
            tail[row, : len(keys)] = keys
        positions = torch.tensor([end + len(paths[node]) - 1 for node in nodes])
        groups.append(
            Group(
                rows=_index([start + node for node in nodes]),
                head=_tree_head(pool, rows, base, [end + node for node in before]),
                tail=tail,
                **_sight(pool, positions, tile),
            )
        )
    return groups


def _tree_head(pool: KVPool, rows: Rows, base: int, before: list[int]) -> slice | torch.Tensor | None:
    """Positions up to ``base``: committed ones, and the nodes ``before`` it where the tree crosses a tile's border."""
    if base == 0:
        return None
    if not before:
        return pool.window(rows.session_id, 0, base)
    owned = pool.rows_of(rows.session_id)
    return torch.cat([owned[: rows.context + rows.chain], owned[before]])


def _sight(pool: KVPool, positions: torch.Tensor, tile: int) -> dict[str, torch.Tensor]:
    tail = torch.arange(tile * TILE, (tile + 1) * TILE)
    return {"positions": positions.to(pool.device), "visible": (tail <= positions[:, None]).to(pool.device)}


def _index(rows: list[int]) -> slice | torch.Tensor:
    """A slice where ``rows`` are neighbours."""
    neighbours = rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if neighbours else torch.tensor(rows)
