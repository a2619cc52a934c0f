"""G4: whether attention gives a row of a tree, and of a prompt, the bits of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.gpu_check.packings import PackedTree, bushy_tree, rows_of, starts_of, tree
from benchmarks.gpu_check.verdicts import GateVerdict, judge_rows
from services.verifier.attention.calls import Call
from services.verifier.kernels.triton.pass_shape import GpuAttentionSizes, PassShape
from services.verifier.kernels.triton.tree_pass import TritonPass
from services.verifier.kernels.triton.virtual_groups import Pack, pack
from services.verifier.kv_cache.pool import BLOCK, KVPool
from services.verifier.model.target_port import Rows

# Query heads per key, size of a head, and window: inflated model, Llama-3, Qwen2.5-7B, a Gemma-like one.
SHAPES = ((3, 64, None), (4, 128, None), (7, 128, None), (2, 256, 300))
# Those whose keys and values are held in eight bits as well.
ROUNDED = SHAPES[1:2]
# By the seed of a packing: rows of another request in the pass.
_BESIDE = {1: 0, 2: 7, 3: 40}


class RandomText:
    """Random queries, keys and values of a text; passes over them in any packing.

    Args:
        rounded: whether keys and values are held in eight bits.
    """

    def __init__(
        self, call: Call, length: int, device: str, pack: Pack = pack, least_rows: int = 16, *, rounded: bool = False
    ) -> None:
        self._least_rows = least_rows
        # Passes that gave other bits when they ran again.
        self.unsteady = 0
        generator = torch.Generator().manual_seed(0)
        self._call, self.length, self._pack = call, length, pack
        self._sizes = GpuAttentionSizes.of([call], torch.device(device))
        self._query, self._key, self._value = (
            torch.randn(heads, length, call.key_size, generator=generator).bfloat16().to(device)
            for heads in (call.heads, call.kv_heads, call.kv_heads)
        )
        blocks = -(-(length + 4 * BLOCK) // BLOCK)
        self._pool = KVPool(
            [call], rows=2 * blocks * BLOCK, dtype=torch.bfloat16, device=torch.device(device), whole_rows=True
        )
        if rounded:
            self._pool.round_rows(2 * blocks * BLOCK)
        # Scattered blocks, and another request's.
        self._pool.assign("text", list(range(2 * blocks - 1, 0, -2)), blocks)
        self._pool.assign("other", list(range(0, 2 * blocks, 2)), blocks)

    def run(self, batch: Sequence[Rows], shown: Sequence[int], looped: bool = False) -> torch.Tensor:
        """[rows, heads, size] of a pass whose rows have queries, keys and values of the text's positions ``shown``.

        Args:
            looped: a program computes all segments of its rows, though programs would be too few then.
        """
        shape = PassShape.of(batch, self._sizes, len(shown), self._least_rows)
        shape = replace(shape, split=False, parts=0) if looped else shape
        laid_out = TritonPass(self._pool, shape, pack=self._pack)
        laid_out.fill(batch)
        places = torch.tensor(shown, device=self._query.device)
        given = [each[:, places] for each in (self._query, self._key, self._value)]
        made, again = (laid_out.attend(self._call, *given) for _ in range(2))
        self.unsteady += not torch.equal(made, again)
        return made

    def prompt(self, name: str, end: int, looped: bool = False) -> torch.Tensor:
        """The first ``end`` positions in one pass; ``looped`` as in ``run``."""
        return self.run([rows_of(name, 0, [0] * end)], range(end), looped)

    def restore(self, start: int) -> None:
        """Compute what follows ``start`` again, after a tree has overwritten it."""
        count = self.length - start
        self.run([rows_of("text", start, [0] * count)], range(start, self.length))

    def plain(self, position: int) -> torch.Tensor:
        """One position, alone; those before it must be computed."""
        return self.run([rows_of("text", position, [0])], [position])[0]

    def path(self, packed: PackedTree, beside: int) -> torch.Tensor:
        """The path's rows of a tree, beside ``beside`` rows of another request."""
        rows = [rows_of("text", packed.start, [0] * len(packed.shown), packed.parents)]
        others = [rows_of("other", 0, [0] * beside)] if beside else []
        made = self.run([*others, *rows], [*range(beside), *packed.shown])
        return made[[beside + row for row in packed.path]]


def attention(
    device: str,
    length: int = 1100,
    depth: int = 12,
    others: int = 6,
    shapes: Sequence[tuple[int, int, int | None]] = SHAPES,
    rounded: Sequence[tuple[int, int, int | None]] = ROUNDED,
    *,
    pack: Pack = pack,
    least_rows: int = 16,
) -> GateVerdict:
    """G4, every pass twice.

    Args:
        shapes, rounded: queries a key, sizes of heads and windows, of keys and values as they are and in eight bits.
        pack: puts the nodes of a tree into groups.
        least_rows: see ``PassShape.of``.
    """
    wrong: list[str] = []
    compared = 0
    for number, (share, size, window) in enumerate((*shapes, *rounded)):
        in_bytes = number >= len(shapes)
        call = Call(entry=0, heads=2 * share, kv_heads=2, key_size=size, value_size=size, scale=size**-0.5, window=window)
        text = RandomText(call, length, device, pack, least_rows, rounded=in_bytes)
        looped = text.prompt("text", length, looped=True)
        whole = text.prompt("text", length)
        name = f"{share} queries a key, heads of {size}{f', window {window}' if window else ''}"
        name += ", in eight bits" if in_bytes else ""
        for start in starts_of(length, depth):
            positions = range(start, start + depth + 1)
            plain = torch.stack([text.plain(position) for position in positions])
            found = {"prompt": whole[start : start + depth + 1], "prompt in a loop": looped[start : start + depth + 1]}
            for seed in _BESIDE:
                beside = min(length, _BESIDE[seed])
                found[f"tree {seed}"] = text.path(tree(start, depth, others, length, seed), beside)
                text.restore(start)
            found["bushy tree"] = text.path(bushy_tree(start, depth, length), 0)
            text.restore(start)
            compared += len(found) * len(positions)
            for packing, made in found.items():
                wrong += [
                    f"{name}: {packing}, position {position}"
                    for position, one, other in zip(positions, made, plain, strict=True)
                    if not torch.equal(one, other)
                ]
        wrong += [f"{name}: {text.unsteady} passes that ran again"] if text.unsteady else []
    return judge_attention(wrong, compared)


def judge_attention(wrong: Sequence[str], compared: int) -> GateVerdict:
    """The verdict on rows whose bits are not those of plain decoding."""
    return judge_rows(
        wrong,
        compared,
        differ="differ from plain decoding",
        same="in prompts and trees have the bits of plain decoding",
        look="if G3 passed, compare a single tile, then a single segment",
        follows="attention is exact",
    )
