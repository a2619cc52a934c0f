"""Tree attention by Triton kernels, for prompts, plain rows and trees alike; see ``device.tree_attend``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton

from services.verifier.attention.calls import TILE, Call, Pass
from services.verifier.attention.fixed import MOST_ROWS, Largest, row_steps, rows_up
from services.verifier.attention.stream_layout import streams_last
from services.verifier.kernels.triton.compile_options import COMPILED
from services.verifier.kernels.triton.device.rotate_write import rotate_write
from services.verifier.kernels.triton.device.tree_attend import attend, merge
from services.verifier.kernels.triton.device.write_rows import write_rows
from services.verifier.kernels.triton.pass_buffers import PassBuffers, PassPlace
from services.verifier.kernels.triton.pass_describer import PassDescriber
from services.verifier.kernels.triton.pass_meta import SEGMENT, blocks_at, slots_at, sums_at, work_at
from services.verifier.kernels.triton.pass_shape import (
    NARROW,
    WIDE,
    GpuAttentionSizes,
    PassRoom,
    PassShape,
    programs_at_once,
    warps_of,
)
from services.verifier.kernels.triton.row_products import NORM_LANES, HeadNorms, Product
from services.verifier.kernels.triton.virtual_groups import Pack, pack
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.gpu_here import OLDEST
from services.verifier.model.target_port import Rows, tokens_of
from services.verifier.model.to_device import to_device
from services.verifier.model.tree_rows import sizes_of

# Programs of attention for each that a GPU runs at a time: it may run more of some kinds. They share the work.
_WAITING = 2
# Head sizes; the smallest and largest that the tests cover.
_SIZES = range(16, 257)


def too_old(capability: tuple[int, int]) -> str:
    """Why a GPU of this compute capability has no matrix units for bfloat16; empty if it has."""
    if capability >= OLDEST:
        return ""
    wanted, found = (".".join(map(str, each)) for each in (OLDEST, capability))
    return f"the GPU's compute capability is {found}: needs {wanted} or later (Ampere)"


def refusal(calls: Sequence[Call], dtype: torch.dtype, capability: tuple[int, int] | None) -> str:
    """Why the kernels cannot compute these calls; empty if they can.

    Args:
        dtype: of keys and values.
        capability: the GPU's compute capability; None: Triton's interpreter runs them.
    """
    if capability is not None and (old := too_old(capability)):
        return old
    if capability is not None and dtype not in (torch.bfloat16, torch.float16):
        return f"keys and values are {str(dtype).removeprefix('torch.')}: must be bfloat16 or float16"
    for call in calls:
        if call.key_size not in _SIZES or call.value_size not in _SIZES:
            sizes = f"{call.key_size}" if call.key_size == call.value_size else f"{call.key_size} and {call.value_size}"
            return f"heads are {sizes} wide: must be from {_SIZES.start} to {_SIZES.stop - 1}"
        if call.bias is not None:
            return "scores have a bias by position (alibi)"
        if call.scale <= 0:
            return f"scores are multiplied by {call.scale}: must be above 0"
    return ""


class TritonBuckets:
    """Implements ``Buckets``: by shape, rows rounded up.

    Args:
        pack: puts the nodes of a tree into groups.
    """

    def __init__(self, pool: KVPool, pack: Pack = pack) -> None:
        self._pool, self._pack = pool, pack
        self._sizes = GpuAttentionSizes.of(pool.calls, pool.device)
        self._scratch = Scratch(pool.device)
        # Of the passes that are captured, if it was asked for all of them.
        self._largest: Largest | None = None

    def bucket(self, batch: Sequence[Rows]) -> PassShape | None:
        rows = sum(sizes_of(batch))
        if rows > MOST_ROWS:
            return None
        shape = PassShape.of(batch, self._sizes, rows_up(rows))
        return shape if self._largest is None or shape.within(self._room(shape.rows, self._largest)) else None

    def allowed(self, largest: Largest) -> list[PassShape]:
        self._largest, share = largest, self._sizes.share
        # Blocks are narrow as long as every request has few rows; with more queries a key than a narrow one takes, never.
        few = max(1, NARROW // share)
        return [
            PassShape(
                rows=rows, block_rows=max(1, size // share), split=split,
                parts=self._room(rows, largest).parts if split else 0, tiles=self._room(rows, largest).tiles,
            )
            for rows in row_steps(min(MOST_ROWS, largest.rows))
            for split in ((True, False) if largest.positions > SEGMENT else (False,))
            for size in (WIDE, NARROW)
            if self._occurs(rows, few, size, largest.requests)
        ]  # fmt: skip

    def _room(self, rows: int, largest: Largest) -> PassRoom:
        """That of captured passes of so many rows."""
        return PassRoom(
            parts=min(self._sizes.parts, rows * -(-largest.positions // SEGMENT)),
            tiles=min(rows, largest.requests) * -(-largest.positions // TILE) + 1,
        )

    def _occurs(self, rows: int, few: int, size: int, requests: int) -> bool:
        """Whether some pass of so many rows, rounded up, has blocks of this size."""
        if self._sizes.share > NARROW:
            return size == WIDE
        return rows > few if size == WIDE else rows <= rows_up(requests * few)

    def make(self, bucket: PassShape) -> TritonPass:
        made = TritonPass(self._pool, bucket, self._scratch, self._pack)
        made.reserve()
        return made

    def launched(self, batch: Sequence[Rows], padding: int, stream_rows: Sequence[int] | None = None) -> Pass:
        """A pass of any size, for once; ``stream_rows`` as in ``stream_layout.streams_last``."""
        rows = sum(sizes_of(batch)) + padding
        sizes = self._sizes
        if self._largest is not None:
            # In the memory that captured passes have anyhow.
            sizes = replace(sizes, parts=self._room(min(MOST_ROWS, self._largest.rows), self._largest).parts)
        made = TritonPass(self._pool, PassShape.of(batch, sizes, rows), self._scratch, self._pack)
        made.fill(batch)
        return made if stream_rows is None else StreamTritonPass(made, streams_last(batch, padding, stream_rows))


class Scratch:
    """Memory for the sums of segments, and for what describes a captured pass. Passes, and layers, take turns.

    Attributes:
        buffers: of captured passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.empty(0, dtype=torch.float32, device=device)
        self.buffers = PassBuffers(device)

    def sums(self, numbers: int) -> torch.Tensor:
        """So many float32. Whoever captures it must keep it: a larger one takes its place."""
        if len(self._sums) < numbers:
            self._sums = self._sums.new_empty(numbers)
        return self._sums


class TritonPass:
    """Implements ``FixedPass``.

    Args:
        scratch: shared with other passes; None: its own.
        pack: puts the nodes of a tree into groups.

    Attributes:
        tokens, positions: [rows], int64; set by ``enter``, which a pass that is not reserved does by itself.
    """

    def __init__(self, pool: KVPool, shape: PassShape, scratch: Scratch | None = None, pack: Pack = pack) -> None:
        self._pool, self._shape = pool, shape
        self._describer = PassDescriber(pool, pack)
        device, rows = pool.device, shape.rows
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._meta = torch.zeros(0, dtype=torch.int32, device=device)
        self._scratch = Scratch(device) if scratch is None else scratch
        self._sums_at: torch.Tensor | None = None
        # Of a captured pass.
        self._place: PassPlace | None = None

    def reserve(self) -> None:
        """Take room for any pass of the shape, so that what describes a pass always lies in one place."""
        self._place = self._scratch.buffers.reserve(self._shape.rows, self._shape.ints())
        self._meta = self._place.description
        if self._shape.split:
            self._sums_at = self._scratch.sums(max(_apart(call, self._shape.parts)[-1] for call in self._pool.calls))

    def fill(self, batch: Sequence[Rows]) -> None:
        if self._place is not None:
            self._stage(batch, self._place)
            return
        shape = self._shape
        found = self._describer.describe(batch, shape.rows, shape.block_rows, shape.split)
        if len(found.numbers) > len(self._meta):
            self._meta = self._meta.new_zeros(len(found.numbers))
        self._meta[: len(found.numbers)].copy_(to_device(found.numbers, self._pool.device))
        self.tokens.copy_(to_device(found.tokens, self._pool.device))
        self.positions.copy_(self._meta[: shape.rows])

    def _stage(self, batch: Sequence[Rows], place: PassPlace) -> None:
        shape, buffers = self._shape, self._scratch.buffers
        tokens, numbers = buffers.next(place)
        count = self._describer.describe_into(batch, shape.rows, shape.block_rows, shape.split, numbers)
        given = tokens_of(batch)
        tokens[: len(given)], tokens[len(given) :] = given, 0
        buffers.send(place, count)

    def enter(self) -> None:
        if self._place is not None:
            self.tokens.copy_(self._place.tokens)
            self.positions.copy_(self._meta[: self._shape.rows])

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values, *scales = self._held(call)
        key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
        write_rows[(self._shape.rows, call.kv_heads)](
            key, value, keys, values, *scales, self._meta, (*key.stride()[:2], *value.stride()[:2]), *_strides(keys, values),
            slots_at(self._shape.rows), BYTES=self._pool.rounded, **_sizes(call), **COMPILED,
        )  # fmt: skip
        return self.attended(call, query)

    def rotated(
        self, call: Call, product: Product, turns: tuple[torch.Tensor, torch.Tensor], norms: HeadNorms | None
    ) -> torch.Tensor:
        """Store the rows' keys and values, keys rotated; returns the rotated queries, [heads, rows, key size].

        Args:
            product: [rows, queries, keys and values of all heads].
            turns: cosines and sines, [1, rows, turned] each; as many numbers of a head are rotated.

        Raises:
            NotImplementedError: rows do not have a rotation each.
        """
        rows, turned = self._shape.rows, turns[0].shape[-1]
        cosine, sine = (each.contiguous() for each in turns)
        if not cosine.shape == sine.shape == (1, rows, turned) or turned > call.key_size or turned % 2:
            raise NotImplementedError(f"its positions are rotated in {tuple(cosine.shape)}")
        keys, values, *scales = self._held(call)
        queries = torch.empty(rows, call.heads, call.key_size, dtype=self._pool.dtype, device=keys.device)
        of_query, of_key, eps, rounded = norms or (queries, queries, 0.0, False)
        if norms is not None and product.parts:
            # A norm's sum must run in one order for any number of rows, but Triton spreads lanes over threads in other ways
            # where it reads parts (tests/kernels/compiled_launches.py).
            product = Product(product.added(queries.dtype))
        rotate_write[(rows, call.heads + call.kv_heads)](
            product.numbers, product.some_bias, cosine, sine, of_query, of_key, queries, keys, values, *scales,
            self._meta, *_strides(keys, values), turned, product.apart, eps, slots_at(rows), HEADS=call.heads,
            KV_HEADS=call.kv_heads, TURNED=turned, PARTS=product.parts, BIAS=product.bias is not None,
            NORMED=norms is not None, ROUNDED=rounded, BYTES=self._pool.rounded, BLOCK=NORM_LANES, **_sizes(call),
            **COMPILED,
        )  # fmt: skip
        return queries.transpose(0, 1)

    def attended(self, call: Call, query: torch.Tensor) -> torch.Tensor:
        """Attend over keys that are stored: [heads, rows, key size] to [rows, heads, value size]."""
        shape, meta = self._shape, self._meta
        keys, values, *scales = self._held(call)
        if self._pool.rounded:
            # See ``device.held_bytes``.
            keys, values = keys.mT.view(torch.int16).mT, values.view(torch.int16)
        query = query if query.stride(2) == 1 else query.contiguous()
        sizes, strides = _sizes(call), _strides(keys, values)
        made = torch.empty(shape.rows, call.heads, call.value_size, dtype=query.dtype, device=query.device)
        tops, totals, partial = self._sums(call) if shape.split else (made, made, made)
        sinks = made if call.sinks is None else call.sinks
        capped = call.softcap is not None
        cap = (call.scale / call.softcap, call.softcap) if call.softcap is not None else (1.0, 1.0)
        unit = math.log2(math.e) * (1.0 if capped else call.scale)
        sight = {"WINDOW": call.window or 0, "CHUNK": call.chunk or 0, "SINKS": call.sinks is not None}
        most = shape.parts if shape.split else shape.rows
        lanes = max(NARROW, triton.next_power_of_2(shape.block_rows * call.share))
        attend[(min(most, _WAITING * programs_at_once(meta.device, call.kv_heads)), call.kv_heads)](
            query, keys, values, *scales, made, tops, totals, partial, sinks, meta, query.stride()[:2], *strides,
            unit, cap, sums_at(shape.rows), blocks_at(shape.rows), work_at(shape.rows), SHARE=call.share, HEADS=call.heads,
            BLOCK=lanes, CAPPED=capped, SPLIT=shape.split, BYTES=self._pool.rounded,
            num_warps=warps_of(lanes, sizes["VALUES"], split=shape.split), **sizes, **sight, **COMPILED,
        )  # fmt: skip
        if shape.split:
            merge[(shape.rows, call.heads)](
                made, tops, totals, partial, sinks, meta, unit, sums_at(shape.rows), HEADS=call.heads, VALUE=call.value_size,
                VALUES=sizes["VALUES"], num_warps=1, **sight, **COMPILED,
            )  # fmt: skip
        return made

    def _held(self, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A call's keys, values, and their scales, for which something stands in where there are none."""
        pool, entry = self._pool, call.entry
        keys, values = pool.keys[entry], pool.values[entry]
        return (keys, values, pool.key_scales[entry], pool.value_scales[entry]) if pool.rounded else (keys, values) * 2

    def _sums(self, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scratch for the segments' maxima, sums of weights and weighted sums."""
        first, second, size = _apart(call, self._shape.parts)
        if self._sums_at is None or len(self._sums_at) < size:
            assert self._place is None, "a captured pass has its sums where they were at first"
            self._sums_at = self._scratch.sums(size)
        own = self._sums_at
        return own[:first], own[first:second], own[second:size]


class StreamTritonPass:
    """Implements ``Pass``: one whose stream rows come behind all others, padding included, and not behind their tree.

    Args:
        inner: the pass in the order of its requests.
        order: of each row, its number there.
    """

    def __init__(self, inner: TritonPass, order: Sequence[int]) -> None:
        self._inner = inner
        self._order = torch.tensor(order, device=inner.positions.device)
        self._back = self._order.argsort()
        self.positions = inner.positions[self._order]

    def attend(self, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (each[:, self._back] for each in (query, key, value))
        return self._inner.attend(call, query, key, value)[self._order]


def _sizes(call: Call) -> dict[str, int]:
    """A call's sizes of heads, and these padded."""
    return {
        "KEY": call.key_size, "KEYS": triton.next_power_of_2(call.key_size),
        "VALUE": call.value_size, "VALUES": triton.next_power_of_2(call.value_size),
    }  # fmt: skip


def _strides(keys: torch.Tensor, values: torch.Tensor) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """As ``device.tree_attend.attend`` takes them."""
    return (keys.stride(0), keys.stride(2), keys.stride(1), keys.stride(3)), (
        values.stride(0),
        values.stride(2),
        values.stride(1),
    )


def _apart(call: Call, parts: int) -> tuple[int, int, int]:
    """Of a call's sums of so many segments: where the sums of weights begin, the weighted sums, and where they end."""
    # Each begins at a multiple of 16 bytes: else Triton would compile the kernels once more, for any addresses.
    count = -(-parts * call.heads // 4) * 4
    return count, 2 * count, 2 * count + parts * call.heads * call.value_size
