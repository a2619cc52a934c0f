"""A target that follows ``law``, with the real allocator of the key-value cache's blocks and a store that can be wrong.

What a request has computed lies in its blocks, a row for each position, and is read from there in every pass. So a block
that is lost, given out twice or shared with another text shows in the answer. A target with states holds the same sum a
second time, as ``states`` has stepped it; where the two differ, other tokens are chosen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

from services.model_files.generation_config import GenerationConfig
from services.verifier.kv_cache.blocks import BlockAllocator
from services.verifier.kv_cache.kept_states import KeptStates
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.target_port import (
    NOT_CHOSEN,
    ColumnRows,
    Outcome,
    Prefix,
    Rows,
    Sampling,
    SingleRows,
    StreamSpec,
)
from speculation.errors import TargetLost
from speculation.types import Features, SamplingParams
from tests.simulation.fault_points import FaultPoints
from tests.simulation.law import EOS, chosen, row_of
from tests.simulation.states import SimulatedStates

_GREEDY = Sampling(params=SamplingParams(), prompt_length=0)


class Worker:
    """The thread of a target: every call takes as long as the world says, or as long as the next pass is to hang."""

    def __init__(self, pass_s: float, faults: FaultPoints) -> None:
        self._pass_s = pass_s
        self._faults = faults
        self.hang_s = 0.0

    def seconds(self) -> float:
        """Of the next call."""
        hang_s, self.hang_s = self.hang_s, 0.0
        return hang_s or self._pass_s * (20 if self._faults.fires("target: a pass is slow") else 1)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Call it once its time is over."""
        worker: Any = self
        return asyncio.get_running_loop().run_in_executor(worker, function, *arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """There is no thread to end."""


@dataclass(slots=True)
class SimulatedWeights:
    """Weights that have been read beside those that serve; ``NewWeights`` is the real one."""

    number: int
    stored: str = ""
    digest: str = field(init=False)
    config: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        # These stay what was read when the numbers are exchanged.
        self.digest, self.config = f"law {self.number}", SimpleNamespace(model_path=str(self.number))

    def drop(self) -> None:
        """There is no memory to give back."""


class LawfulTarget:
    """Implements ``Target``.

    Args:
        blocks: size of the pool.
        opens: told of every request that is about to get room.
        weights: as of ``plain_answer``.
        kept_states: how many states it keeps, one at every border of blocks; None: it has none.
        stages: as many passes are under way.

    Attributes:
        fail_next, lose_next: the next pass raises.
        passes: how many have begun.
    """

    exact = True
    choosing_s = 0.0
    eos_token_ids = frozenset({EOS})
    adapters: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        blocks: int,
        faults: FaultPoints,
        opens: Callable[[str], None],
        weights: int = 0,
        kept_states: int | None = None,
        stages: int = 1,
    ) -> None:
        self.weights = weights
        self.depth = self.processes = stages
        self._kept_states = kept_states
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.generation = GenerationConfig(eos_token_ids=self.eos_token_ids)
        self._faults = faults
        self._total = blocks
        self._opens = opens
        self.fail_next = self.lose_next = False
        self.recovered = self.passes = 0
        self.recover()

    @property
    def lost_slots(self) -> int:
        """How many slots of states are neither free nor a shared block's."""
        states = self.blocks._states
        return 0 if states is None else (self._kept_states or 0) - len({*states._free}) - len(states._slots)

    def recover(self) -> None:
        count = self._kept_states
        self.blocks = BlockAllocator(self._total, None if count is None else KeptStates(count, BLOCK))
        self._states = None if count is None else SimulatedStates(count)
        self._slots = [0] * (self._total * BLOCK)
        # Of each request: how it chooses, the tokens kept for sealing, and the rows of its last pass.
        self._sampling: dict[str, Sampling] = {}
        self._tokens: dict[str, list[int]] = {}
        self._rows: dict[str, Rows] = {}
        self._under_way: deque[Sequence[Rows]] = deque()
        self.recovered += 1

    def open(
        self, request_id: str, rows: int, prefix: Prefix | None = None, *, sampling: Sampling | None = None, spare: int = 0
    ) -> bool:
        given = prefix or Prefix(tokens=())
        if self._sampling and self._faults.fires("target: the pool says that it is full"):
            return False
        shared = self.blocks.open(request_id, rows, given.tokens, given.tenant, spare=-(-spare // BLOCK), salt=given.salt)
        if shared is None:
            return False
        self._opens(request_id)
        if self._states is not None:
            self._states.open(request_id, shared * BLOCK, self.blocks.state_at_start(request_id))
        if given.tenant is not None:
            self._tokens[request_id] = list(given.tokens[: shared * BLOCK])
        self._sampling[request_id] = sampling or _GREEDY
        return True

    def grow(self, request_id: str, rows: int) -> int:
        return 0 if self.blocks.grow(request_id, rows) is None else rows

    def computed(self, request_id: str) -> int:
        return len(self._tokens.get(request_id, ()))

    def close(self, request_id: str) -> None:
        assert request_id not in self._in_passes, "closed in mid-pass"
        self.blocks.release(request_id)
        self._tokens.pop(request_id, None)
        self._rows.pop(request_id, None)
        self._sampling.pop(request_id, None)
        if self._states is not None:
            self._states.close(request_id)

    def forget(self, tenant: str) -> None:
        self.blocks.forget(tenant)

    @property
    def _in_passes(self) -> set[str]:
        return {rows.request_id for batch in self._under_way for rows in batch}

    def begin(self, batch: Sequence[Rows]) -> None:
        busy = self._in_passes
        for rows in batch:
            assert rows.request_id not in busy, "in two passes"
            room = len(self.blocks.blocks_of(rows.request_id)) * BLOCK
            assert rows.context + len(rows.tokens) <= room, "beyond its room"
        if self._states is not None:
            self._states.step(batch, self.blocks, self.weights)
        self._under_way.append(batch)
        self.passes += 1

    def finish(self) -> list[Outcome]:
        batch = self._under_way.popleft()
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("a planted failure")
        if self.lose_next:
            self.lose_next = False
            raise TargetLost("a planted loss")
        return [self._outcome(rows) for rows in batch]

    def exchange(self, weights: SimulatedWeights) -> None:
        """As ``TransformersTarget.exchange``."""
        assert not self._under_way, "exchanged in mid-pass"
        self.weights, weights.number = weights.number, self.weights
        self.blocks.forget_all()
        # A stage that is lost is missed here, too.
        self.beat()

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None:
        tokens = [self._rows[request_id].tokens[row] for row in rows]
        blocks, slots = self.blocks.blocks_of(request_id), self._slots
        for position, token in enumerate(tokens, context):
            slots[blocks[position // BLOCK] * BLOCK + position % BLOCK] = row_of(token, position, self.weights)
        if self._states is not None:
            self._states.accept(request_id, tokens[self._rows[request_id].chain :])
        kept = self._tokens.get(request_id)
        if kept is not None:
            kept += tokens
            self.blocks.seal(request_id, kept)

    def keep_singles(self, batch: SingleRows) -> None:
        for rows in batch:
            self.keep(rows.request_id, rows.context, (0,))

    def keep_paths(self, batch: ColumnRows, paths: Sequence[Sequence[int]]) -> None:
        for rows, path in zip(batch, paths, strict=True):
            self.keep(rows.request_id, rows.context, (0, *[1 + node for node in path]))

    def _outcome(self, rows: Rows) -> Outcome:
        self._rows[rows.request_id] = rows
        if not rows.logits:
            return Outcome()
        sampling = self._sampling[rows.request_id]
        state = self._state(rows.request_id, rows.context)
        position = rows.context
        for token in rows.tokens[: rows.chain]:
            state += row_of(token, position, self.weights)
            position += 1
        if self._states is not None:
            state = 2 * state - self._states.total(rows.request_id) - self.weights
        choices = [self._choice(sampling, state, position, ())]
        below: list[tuple[int, int, tuple[int, ...], bool]] = []
        for node, parent in enumerate(rows.parents):
            at, depth, path, led = (state, position, (), True) if parent < 0 else below[parent]
            token = rows.tokens[rows.chain + node]
            led = led and token == choices[parent + 1]
            below.append((at + row_of(token, depth, self.weights), depth + 1, (*path, token), led))
            # As the real one: nothing is chosen where earlier choices do not lead.
            choices.append(self._choice(sampling, *below[-1][:3]) if led else NOT_CHOSEN)
        return Outcome(choices=tuple(choices), top_ids=((),) * len(choices) if rows.top_k else ())

    def _choice(self, sampling: Sampling, state: int, position: int, path: tuple[int, ...]) -> int:
        allowed = None
        if sampling.rule is not None and (allowed := sampling.rule.allowed(path)) is None:
            return NOT_CHOSEN
        return chosen(state, position, sampling.params, allowed)

    def _state(self, request_id: str, context: int) -> int:
        """The sum of the rows that the cache holds of a request's first tokens."""
        blocks, slots = self.blocks.blocks_of(request_id), self._slots
        return self.weights + sum(
            sum(slots[block * BLOCK : block * BLOCK + min(BLOCK, context - number * BLOCK)])
            for number, block in enumerate(blocks[: -(-context // BLOCK)])
        )

    def check_layers(self, layers: Sequence[int]) -> None:
        pass

    def streams(self, layers: Sequence[int]) -> StreamSpec | None:
        return None

    def fetch_features(self, asked: Mapping[str, Sequence[int]]) -> None:
        pass

    def features(self, request_id: str, rows: Sequence[int]) -> Features:
        raise NotImplementedError("nobody reads hidden states here")

    def beat(self) -> None:
        if self.lose_next:
            self.lose_next = False
            raise TargetLost("a planted loss")

    def shutdown(self) -> None:
        pass
