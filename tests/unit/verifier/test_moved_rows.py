"""Keys and values of accepted rows: those of all requests move together, as if each had been copied before any was."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.verifier.attention.calls import Call
from services.verifier.kv_cache.pool import BLOCK, KVPool

# Not in order, so that neighbours in a request are none in the pool.
OWNED = {"a": [5, 1, 8], "b": [3], "c": [0, 7]}
# Two calls of one shape, and one of another.
CALLS = [
    Call(entry=entry, heads=2 * kv_heads, kv_heads=kv_heads, key_size=key_size, value_size=value_size, scale=0.25)
    for entry, (kv_heads, key_size, value_size) in enumerate([(2, 16, 16), (1, 24, 8), (2, 16, 16)])
]
Place = tuple[str, int]


def filled(calls: Sequence[Call] = CALLS, whole_rows: bool = False, on_host: bool = True) -> KVPool:
    """Every number in it is another one.

    Args:
        on_host: False: its rows move as on a device.
    """
    pool = KVPool(calls, rows=9 * BLOCK, dtype=torch.float32, device=torch.device("cpu"), whole_rows=whole_rows)
    pool._on_host = on_host
    for keys, values in pool._alike:
        keys.copy_(torch.randn(keys.shape))
        values.copy_(torch.randn(values.shape))
    for owner, blocks in OWNED.items():
        pool.assign(owner, blocks, 0)
    return pool


def rows_of(pool: KVPool) -> dict[Place, torch.Tensor]:
    """What lies at every position of every request, all calls together."""
    return {
        (owner, at): torch.cat(
            [keys[blocks[at // BLOCK], :, :, at % BLOCK].flatten() for keys in pool.keys]
            + [values[blocks[at // BLOCK], :, at % BLOCK].flatten() for values in pool.values]
        )
        for owner, blocks in OWNED.items()
        for at in range(len(blocks) * BLOCK)
    }  # fmt: skip


def check(pool: KVPool, moves: Sequence[tuple[str, Sequence[int], int]]) -> None:
    """Whether after ``moves``, one after the other, rows lie where they belong, and all others where they lay."""
    before = rows_of(pool)
    wanted: Mapping[Place, Place] = {place: place for place in before}
    for owner, sources, start in moves:
        pool.move(owner, sources, start)
        wanted = {**wanted, **{(owner, start + i): wanted[owner, source] for i, source in enumerate(sources)}}
    pool.settle()
    after = rows_of(pool)
    assert all(torch.equal(after[place], before[source]) for place, source in wanted.items())


MOVES: dict[str, list[tuple[str, Sequence[int], int]]] = {
    "none": [("a", [3, 4, 5], 3)],
    "onto others that move": [("a", [3, 5, 6, 7, 9], 3)],
    "over a border of blocks": [("a", [61, 63, 64, 66, 70], 61)],
    "several requests": [("a", [61, 63, 64, 66], 61), ("b", [0, 2, 3], 0), ("c", [64, 65, 70, 71, 72], 64), ("b", [], 3)],
    "twice before a pass": [("a", [60, 62, 64, 65], 60), ("c", [1, 9], 1), ("a", [61, 63], 61), ("a", [60, 66], 60)],
    "there and back": [("a", [7], 3), ("a", [3], 7)],
    "exchanged": [("c", [5, 4], 4)],
}


@pytest.mark.parametrize("on_host", [True, False], ids=["on a host", "as on a device"])
@pytest.mark.parametrize("whole_rows", [False, True], ids=["a column of ones", "aligned"])
@pytest.mark.parametrize("name", MOVES)
def test_rows_lie_where_they_belong(name: str, whole_rows: bool, on_host: bool) -> None:
    check(filled(whole_rows=whole_rows, on_host=on_host), MOVES[name])


@pytest.mark.parametrize("on_host", [True, False], ids=["on a host", "as on a device"])
def test_any_moves(on_host: bool) -> None:
    source, pool = random.Random(0), filled(on_host=on_host)
    for _ in range(30):
        moves = []
        for owner in source.choices(list(OWNED), k=source.randint(1, 4)):
            room = len(OWNED[owner]) * BLOCK
            start, count = source.randrange(room - 20), source.randint(0, 12)
            moves.append((owner, sorted(source.sample(range(start, room), min(count, room - start))), start))
        check(pool, moves)


class Copies(TorchDispatchMode):
    """Counts the operations that copy numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kinds", [1, 2])
def test_as_many_kernels_for_many_requests_as_for_one(kinds: int) -> None:
    pool = filled(CALLS[:1] if kinds == 1 else CALLS, on_host=False)
    with Copies() as counted:
        for owner, sources, start in MOVES["several requests"]:
            pool.move(owner, sources, start)
        assert not counted.names
        pool.settle()
        assert counted.names == ["index", "index_put_"] * 2 * kinds
        counted.names.clear()
        pool.settle()
    assert not counted.names


@pytest.mark.parametrize("on_host", [True, False], ids=["on a host", "as on a device"])
def test_moves_of_a_request_that_has_ended(on_host: bool) -> None:
    """They reach blocks that are shared, and what a new owner gets is wiped after them."""
    pool = filled(on_host=on_host)
    before = rows_of(pool)
    pool.move("a", [10, 12, 63, 66], 10)
    pool.forget("a")
    pool.assign("shares", [5], 0)
    pool.assign("new", [1], 1)
    pool.move("new", [5, 7], 5)
    pool.settle()
    after = rows_of(pool)
    assert torch.equal(after["a", 11], before["a", 12]) and torch.equal(after["a", 13], before["a", 66])
    assert all(not values[1, :, :, :-1].any() for values in pool.values)
    # Nothing is left of them where all is given up.
    pool.move("shares", [9], 3)
    pool.clear()
    pool.settle()
    assert torch.equal(rows_of(pool)["a", 3], before["a", 3])
