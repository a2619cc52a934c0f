"""CUDA graphs of a head's passes over one level of trees: replaying one saves launching its kernels session by session.

Each session has a lane of keys and values at a fixed place, which is filled with its committed rows when its draft begins.
Behind these a lane has room for the rows of the tree, and one place for what padding writes. So what a pass launches depends
on its bucket alone: how many lanes, and of how many committed rows. The output layer's product is in the graph, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.heads.cache import CacheShape, RowCache
from services.drafter.heads.level_attention import LaneRows, Lanes, LevelAttention
from services.drafter.heads.state_head import HeadOutput, StateHead
from services.machine.captured import Capture, Capturing, Copies, Graph, captured, is_memory
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Passes of more rows compute for longer than their launches take.
_MOST_ROWS = 256
# Committed rows of the shortest lanes. Each further kind has twice as many.
_FEWEST = 256
# Most bytes of all lanes.
_MOST_BYTES = 1 << 29
# By so much a replay may differ from a launch, whose kernels may sum in another order.
_NEAR = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelOutput(HeadOutput):
    """As ``HeadOutput``, [rows, h] each.

    Attributes:
        logits: [rows, V_d] of the head's own vocabulary, float32; None: they are not computed yet.
    """

    logits: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelSizes:
    """The largest levels of a source.

    Attributes:
        width: most nodes of a session in one pass.
        rows: most rows of a session's tree.
    """

    width: int
    rows: int


@dataclass(kw_only=True, slots=True)
class _Captured:
    """A bucket's buffers and its graph."""

    given: LaneRows
    states: torch.Tensor
    graph: Graph
    made: LevelOutput


class LevelGraphs:
    """One graph for every bucket of levels.

    Args:
        name: of the source, for the log.
        shape: of its sessions' caches.
        required: as for ``Capturing``.
        capture: captures what a function launches; None: as ``captured`` on a GPU, and nothing elsewhere.
    """

    def __init__(
        self,
        name: str,
        head: StateHead,
        shape: CacheShape,
        sizes: LevelSizes,
        *,
        required: str = "",
        capture: Capture[LevelOutput] | None = None,
        most_rows: int = _MOST_ROWS,
        fewest: int = _FEWEST,
    ) -> None:
        self._name, self._head, self._shape, self._sizes = name, head, shape, sizes
        self._most_rows, self._fewest = most_rows, fewest
        if capture is None and shape.device.type == "cuda":
            # Drafts of other sources, and the target's passes, are launched by other threads meanwhile.
            capture = partial(captured, memory=torch.cuda.graph_pool_handle(), others="thread_local")
        self._capturing = Capturing(capture, f"passes of the head that drafts as {name}", required)
        # Of what all graphs make, which take turns.
        self._copied = Copies()
        self._buckets: dict[tuple[int, int], _Captured] = {}

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture all levels up to the largest; returns the number of graphs. Later none is captured.

        Raises:
            ConfigurationError: there is not enough memory, or graphs are required and the head cannot be captured. One that
                hands on more than keys and values is launched all the same.
        """
        keys = self._keys() if self._capturing.on and self._sizes.rows else []
        if not keys:
            return 0
        try:
            if not self._launches(keys[-1]):
                return 0
            held = torch.zeros(max(map(self._numbers, keys)), dtype=self._shape.dtype, device=self._shape.device)
            for key in keys:
                if (bucket := self._captured(key, held)) is None:
                    self._buckets.clear()
                    break
                self._buckets[key] = bucket
        except Exception as error:
            if not is_memory(error):
                raise
            raise ConfigurationError(
                f"not enough GPU memory to capture passes of the head that drafts as {self._name}: it ended after "
                f"{len(self._buckets)} of {len(keys)} graphs; lower drafter.draft_window, "
                "drafter.speculative_eagle_topk or verifier.gpu_memory_utilization",
                about="drafter.draft_window",
            ) from error
        return len(self._buckets)

    def begin(self, caches: Sequence[RowCache], rows: int) -> LevelPasses | None:
        """Have the committed rows of some sessions in lanes; None if no graph holds them: their levels are launched.

        Args:
            rows: most rows of one of their trees.
        """
        seen = [cache.seen_by_trees() for cache in caches]
        longest = max(each.shape[3] for each in seen)
        fitting = [key for key in self._buckets if key[0] >= len(caches) and key[1] >= longest]
        if not fitting or rows > self._sizes.rows:
            return None
        # The fewest numbers.
        bucket = self._buckets[min(fitting, key=self._numbers)]
        for lane, own in enumerate(seen):
            bucket.given.lanes.fill(lane, own)
        return LevelPasses(bucket, [each.shape[3] for each in seen])

    def _keys(self) -> list[tuple[int, int]]:
        """How many lanes, and of how many committed rows; the largest first."""
        longest, lengths = self._shape.window, [self._fewest]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        counts = [1 << power for power in range((max(1, self._most_rows // self._sizes.width)).bit_length())]
        keys = [key for key in product(counts, lengths) if self._numbers(key) * self._shape.dtype.itemsize <= _MOST_BYTES]
        return sorted(keys, reverse=True)

    def _launches(self, key: tuple[int, int]) -> bool:
        """Whether the head's rows hand nothing on but keys and values, which all its layers have of all rows."""
        shape = self._shape
        if not shape.handed and not any(shape.begins):
            lanes = torch.zeros(self._numbers(key), dtype=shape.dtype, device=shape.device)
            given, states = self._buffers(key, lanes)
            try:
                self._level(given, states)
            except NotImplementedError as error:
                log.info("passes of the head that drafts as %s are launched: %s", self._name, error)
                return False
            return True
        log.info("passes of the head that drafts as %s are launched: its rows hand states on", self._name)
        return False

    def _buffers(self, key: tuple[int, int], held: torch.Tensor) -> tuple[LaneRows, torch.Tensor]:
        """What passes of a bucket read."""
        (count, length), sizes = key, self._sizes
        lanes = Lanes(held[: self._numbers(key)], self._shape, count, length, sizes.rows)
        fused = self._head.fuse(self._head.missing_state.detach())
        states = torch.zeros(count * sizes.width, fused.shape[-1], dtype=fused.dtype, device=fused.device)
        return LaneRows(lanes, sizes.width), states

    def _numbers(self, key: tuple[int, int]) -> int:
        count, length = key
        shape = self._shape
        return shape.layers * 2 * count * shape.heads * (length + self._sizes.rows + 1) * shape.width

    def _captured(self, key: tuple[int, int], held: torch.Tensor) -> _Captured | None:
        given, states = self._buffers(key, held)

        def run() -> LevelOutput:
            made = self._level(given, states)
            assert made.logits is not None
            return LevelOutput(
                hidden=self._copied("hidden", made.hidden),
                state=self._copied("state", made.state),
                logits=self._copied("logits", made.logits),
            )

        def trial(graph: Graph, made: LevelOutput) -> None:
            given.try_out()
            states.copy_(torch.linspace(-1, 1, states.numel(), dtype=states.dtype, device=states.device).view(states.shape))
            graph.replay()
            replayed = [each.clone() for each in (made.hidden, made.state, made.logits) if each is not None]
            launched = self._level(given, states)
            for one, other in zip(replayed, (launched.hidden, launched.state, launched.logits), strict=True):
                if other is None or not bool(((one - other).abs() <= _NEAR * (1 + other.abs())).all()):
                    raise RuntimeError("a replay makes other numbers than the launch")

        found = self._capturing.of(run, trial)
        if found is None:
            return None
        return _Captured(given=given, states=states, graph=found[0], made=found[1])

    def _level(self, given: LaneRows, states: torch.Tensor) -> LevelOutput:
        head = self._head
        made = head(
            head.embed(given.tokens)[None], states[None], given.positions[None], LevelAttention(given, given.visible())
        )
        logits = head.logits(made.hidden[0], head.vocabulary).float()
        return LevelOutput(hidden=made.hidden[0], state=made.state[0], logits=logits)


class LevelPasses:
    """The levels of some drafts, replayed.

    Args:
        committed: of each lane in use, its committed rows.
    """

    def __init__(self, bucket: _Captured, committed: Sequence[int]) -> None:
        self._bucket, self._committed = bucket, committed

    def run(
        self,
        tokens: NDArray[np.int64],
        states: torch.Tensor,
        positions: NDArray[np.int64],
        seen: Mapping[int, NDArray[np.bool_]],
    ) -> LevelOutput:
        """One pass over nodes of the drafts. The next one overwrites what it gives.

        Args:
            tokens, states, positions: of all nodes, lane by lane, [nodes], [nodes, h] and [nodes].
            seen: by lane, as ``GrowingDraft.enter`` gives it.
        """
        bucket = self._bucket
        at = bucket.given.lay_out(tokens, positions, seen, self._committed)
        bucket.states[at] = states
        bucket.graph.replay()
        made = bucket.made
        assert made.logits is not None
        return LevelOutput(hidden=made.hidden[at], state=made.state[at], logits=made.logits[at])

    def give_back(self, lane: int, cache: RowCache, rows: int) -> None:
        """Copy the tree's rows to where its session has them."""
        cache.tree_rows(rows).copy_(self._bucket.given.lanes.tree(lane, rows))
