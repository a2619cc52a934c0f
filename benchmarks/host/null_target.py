"""A target that takes no time: it lays passes out and turns choices into outcomes as for a GPU, but multiplies nothing."""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from benchmarks.host.gpu_layout import GpuLayout
from services.verifier.attention.calls import Call
from services.verifier.attention.fixed import MOST_ROWS, Largest, rows_up
from services.verifier.choosing.chooser import Chooser
from services.verifier.choosing.likeliest_ids import Tops
from services.verifier.kernels.triton.pass_describer import PassDescriber
from services.verifier.kv_cache.blocks import BlockAllocator
from services.verifier.kv_cache.pool import BLOCK, KVPool, in_place
from services.verifier.model.target_port import (
    ColumnRows,
    Outcome,
    Prefix,
    Rows,
    Sampling,
    SingleRows,
    StreamSpec,
    tokens_of,
)
from services.verifier.model.tree_rows import TreeRows, counts_of, top_ks_of
from speculation.id_rows import IdRows
from speculation.types import Features

# Rows of a request that read keys and values together: of a model with four query heads per key-value head.
_BLOCK_ROWS = 4
# A phrase comes again with one token in so many changed.
_PHRASE, _CHANGED = 48, 10
_PHRASES = 6
VOCAB_SIZE = 128_256
# Ids of texts are below it; those above are likely after them.
_LARGEST = VOCAB_SIZE - 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PassMark:
    """When a pass ended: seconds on the clock and of the process's processors, and how many passes there were.

    Attributes:
        thread_s: of a processor, those of the target's thread alone.
        own_s: what only the benchmark does, in the target's thread; it is in none of the others.
    """

    passes: int
    wall_s: float
    cpu_s: float
    thread_s: float
    own_s: float
    tokens: int
    nodes: int


class _ScriptedIds:
    """Likely ids that are there already, as a GPU has found them.

    Attributes:
        choices: of the pass, after every row that is read.
        own_s: of the thread's processor, what this took.
    """

    def __init__(self) -> None:
        self.choices: Sequence[int] = ()
        self.own_s = 0.0

    def send(self, batch: Sequence[Rows], logits: torch.Tensor) -> Callable[[], Tops]:
        """Implements ``SendLikely``."""
        choices = self.choices

        def found() -> Tops:
            start = time.thread_time()
            counts, widths = counts_of(batch), top_ks_of(batch)
            flat = {k: likely_after(choices, k) for k in {*widths} if k}
            ends = pairwise(accumulate(counts, initial=0))
            tops: Tops = [
                IdRows(flat[k][begin * k : end * k], k) if k else () for (begin, end), k in zip(ends, widths, strict=True)
            ]
            self.own_s += time.thread_time() - start
            return tops

        return found


class NullTarget:
    """Implements ``Target``. Blocks of the cache, descriptions of passes and the chooser are the real ones.

    Args:
        texts: what it says after each request's prompt, by request id: prompt and answer.
        rows: rows of the key-value cache.
        marked: called after every ``every`` passes, in the target's thread.
        largest: the largest passes, and ``pass_s`` the seconds that each takes: passes are laid out for captured graphs, see
            ``GpuLayout``; None: they are described, and take no time.

    Attributes:
        layout_s: seconds spent on laying passes out, and launching them.
        early_s, waited_s: on what is done for a pass while it runs, and on waiting for it then.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({0})
    depth = processes = 1

    def __init__(
        self,
        texts: Mapping[str, Sequence[int]],
        *,
        rows: int,
        max_model_len: int,
        every: int,
        marked: Callable[[PassMark], None],
        largest: Largest | None = None,
        pass_s: float = 0.0,
    ) -> None:
        self.max_model_len = max_model_len
        self.choosing_s = self.layout_s = self.early_s = self.waited_s = 0.0
        self._texts = texts
        call = Call(entry=0, heads=4, kv_heads=1, key_size=16, value_size=16, scale=0.25)
        self._pool = KVPool([call], rows=rows, dtype=torch.bfloat16, device=torch.device("cpu"), whole_rows=True)
        self._describer = PassDescriber(self._pool)
        self._gpu = None if largest is None else GpuLayout(self._pool, largest, pass_s)
        self._blocks = BlockAllocator(self._pool.total_blocks)
        self._likely = _ScriptedIds()
        self._chooser = Chooser(self.eos_token_ids, send_likely=self._likely.send)
        self._computed: dict[str, list[int]] = {}
        self._rows: dict[str, Rows] = {}
        self._under_way: deque[Sequence[Rows]] = deque()
        self._every, self._marked = every, marked
        self._passes = self._tokens = self._nodes = 0

    def open(
        self, request_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        given = Prefix(tokens=()) if prefix is None else prefix
        shared = self._blocks.open(request_id, rows, given.tokens, given.tenant, spare=-(-spare // BLOCK), salt=given.salt)
        if shared is None:
            return False
        blocks = self._blocks.blocks_of(request_id)
        self._pool.assign(request_id, blocks, len(blocks) - shared)
        self._computed[request_id] = list(given.tokens[: shared * BLOCK])
        self._chooser.open(request_id, sampling, given.tokens)
        return True

    def grow(self, request_id: str, rows: int) -> int:
        taken = self._blocks.grow(request_id, rows)
        if taken:
            self._pool.assign(request_id, taken, len(taken))
        return 0 if taken is None else BLOCK * len(self._blocks.blocks_of(request_id))

    def computed(self, request_id: str) -> int:
        return len(self._computed.get(request_id, ()))

    def close(self, request_id: str) -> None:
        self._blocks.release(request_id)
        self._pool.forget(request_id)
        self._computed.pop(request_id, None)
        self._rows.pop(request_id, None)
        self._chooser.close(request_id)

    def begin(self, batch: Sequence[Rows]) -> None:
        self._under_way.append(batch)
        if not isinstance(batch, SingleRows):
            self._rows.update((rows.request_id, rows) for rows in batch)

    def finish(self) -> Sequence[Outcome]:
        batch = self._under_way.popleft()
        start = time.perf_counter()
        self._pool.settle()
        if self._gpu is not None:
            self._gpu.launch(batch)
        else:
            rows = len(tokens_of(batch))
            self._describer.describe(batch, rows_up(rows) if rows <= MOST_ROWS else rows, _BLOCK_ROWS, True)
        self.layout_s += time.perf_counter() - start
        # As from a GPU for greedy requests: the ids of all rows come as one list.
        began = time.thread_time()
        ids = self._likely.choices = self._choices(batch)
        self._likely.own_s += time.thread_time() - began
        said = arrived = time.perf_counter()

        def likeliest() -> list[int]:
            nonlocal arrived
            asked = time.perf_counter()
            if self._gpu is not None:
                self._gpu.device.wait()
            arrived = time.perf_counter()
            self.early_s += asked - said
            self.waited_s += arrived - asked
            return ids

        try:
            return self._chooser.outcomes(batch, torch.empty(len(ids), 1, device="meta", dtype=torch.float32), likeliest)
        finally:
            self.choosing_s = time.perf_counter() - (said if self._gpu is None else arrived)
            self._count(batch)

    def _choices(self, batch: Sequence[Rows]) -> list[int]:
        if isinstance(batch, SingleRows):
            pairs = zip(batch.request_ids, batch.contexts, strict=True)
            return [self._texts[request_id][context + 1] for request_id, context in pairs]
        if isinstance(batch, TreeRows):
            return self._choices_of_trees(batch)
        return [
            choice
            for each in batch
            if each.logits
            for choice in choices_of(self._texts[each.request_id], each.context, each.tokens, each.parents)
        ]

    def _choices_of_trees(self, batch: TreeRows) -> list[int]:
        choices, node = list[int](), 0
        columns = zip(batch.request_ids, batch.contexts, batch.counts, strict=True)
        for number, (request_id, context, count) in enumerate(columns):
            tokens = batch.tokens[node + number : node + number + 1 + count]
            choices += choices_of(self._texts[request_id], context, tokens, batch.parents[node : node + count])
            node += count
        return choices

    def _count(self, batch: Sequence[Rows]) -> None:
        self._passes += 1
        if isinstance(batch, TreeRows):
            self._nodes += len(batch.parents)
        elif not isinstance(batch, SingleRows):
            self._nodes += sum(len(rows.parents) for rows in batch)
        if self._passes % self._every == 0:
            own_s = self._likely.own_s
            self._marked(
                PassMark(
                    passes=self._passes,
                    wall_s=time.perf_counter() - own_s,
                    cpu_s=time.process_time() - own_s,
                    thread_s=time.thread_time() - own_s,
                    own_s=own_s,
                    tokens=self._tokens,
                    nodes=self._nodes,
                )
            )

    def check_layers(self, layers: Sequence[int]) -> None:
        """It has hidden states of none, and is asked for none."""

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return None

    def fetch_features(self, asked: Mapping[str, Sequence[int]]) -> None:
        """It has none."""

    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        raise NotImplementedError

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        computed = self._rows[request_id].tokens
        self._keep(request_id, context, rows, [computed[row] for row in rows])

    def keep_paths(self, batch: ColumnRows, paths: Sequence[Sequence[int]]) -> None:
        first, tokens = 0, batch.tokens
        for request_id, context, count, path in zip(batch.request_ids, batch.contexts, counts_of(batch), paths, strict=True):
            rows = [0, *[1 + node for node in path]]
            self._keep(request_id, context, rows, [tokens[first + row] for row in rows])
            first += count

    def _keep(self, request_id: str, context: int, rows: Sequence[int], kept: list[int]) -> None:
        if not in_place(rows):
            self._pool.move(request_id, [context + row for row in rows], context)
        self._chooser.commit(request_id, context, kept)
        self._tokens += len(kept)
        own = self._computed[request_id]
        own += kept
        self._blocks.seal(request_id, own)

    def keep_singles(self, batch: SingleRows) -> None:
        for request_id, token in zip(batch.request_ids, batch.tokens, strict=True):
            own = self._computed[request_id]
            own.append(token)
            if len(own) % BLOCK == 0:
                self._blocks.seal(request_id, own)
        self._tokens += len(batch)

    def forget(self, tenant: str) -> None:
        self._blocks.forget(tenant)

    def beat(self) -> None:
        """It always answers."""

    def recover(self) -> None:
        """It is never lost."""

    def shutdown(self) -> None:
        """It holds nothing outside this process."""


def scripted_text(seed: int, length: int) -> list[int]:
    """``length`` token ids, without 0, the end of text: phrases come again with changes, so that drafters find something."""
    draw = random.Random(seed)
    phrases = [[draw.randrange(1, _LARGEST) for _ in range(_PHRASE)] for _ in range(_PHRASES)]
    text: list[int] = []
    while len(text) < length:
        phrase = draw.choice(phrases)
        text += [draw.randrange(1, _LARGEST) if draw.randrange(_CHANGED) == 0 else token for token in phrase]
    return text[:length]


def likely_after(tokens: Sequence[int], count: int) -> array[int]:
    """``count`` ids for each token, itself first: what a target that chooses it might also find likely."""
    chosen = np.array(tokens, dtype=np.int32).clip(0)
    return array("i", (chosen[:, None] + np.arange(count, dtype=np.int32)).tobytes())


def choices_of(text: Sequence[int], context: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The text's token after a chain and after every node on its way; 0 after the other nodes, which nobody gets to.

    Args:
        tokens: of the chain's rows and the nodes behind them; ``parents``: the nodes'.
    """
    chain = len(tokens) - len(parents)
    at = context + chain
    # Tokens of the text between the chain and each node; -1: it is not on the text's way.
    depths = [0]
    for token, parent in zip(tokens[chain:], parents, strict=True):
        depth = depths[parent + 1]
        depths.append(depth + 1 if depth >= 0 and token == text[at + depth] else -1)
    return [0 if depth < 0 else text[at + depth] for depth in depths]
