"""How fast a verifier decodes and reads prompts, by the number of its requests, as the engine's budget chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet.cost_tables import Hardware
from speculation.budget import MeasuredBudget
from speculation.costs import Load
from speculation.types import TokenTree

# Share of the steps in which the first, second, ... drafted token was accepted: `blend`, which needs no training, on the
# built-in prompts and model, one request at a time (docs/benchmarks.md). Other models and texts have others.
BLEND = (0.44, 0.29, 0.23, 0.15, 0.10, 0.08)
# Committed tokens of a request at which the budget chooses, and tokens of a prompt that are computed already.
_CONTEXT = 1500
# Most drafted tokens of a request.
_MOST_NODES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step with so many decoding requests in each stage's batch, without and with a chunk of a prompt.

    Attributes:
        tokens: that a request gets, on average.
        nodes: drafted tokens of all requests.
        base_s: seconds, without the keys.
        key_s: seconds for each committed token of all its requests.
        prompt_rows: prompt tokens of a step that has any.
        prompt_s: seconds that they add.
    """

    tokens: float
    nodes: int
    base_s: float
    key_s: float
    prompt_rows: int
    prompt_s: float


class StepPace:
    """Steps of one verifier.

    Args:
        acceptance: of the first, second, ... drafted token: the probability that the target takes the draft so far;
            none: plain decoding.
    """

    def __init__(self, hardware: Hardware, acceptance: Sequence[float] = BLEND) -> None:
        self._hardware = hardware
        self._budget = MeasuredBudget(hardware.costs, max_nodes=_MOST_NODES, max_step_s=hardware.max_step_s)
        kept = tuple(acceptance[:_MOST_NODES])
        self._tree = TokenTree(
            tokens=(1,) * len(kept), parents=tuple(range(-1, len(kept) - 1)), sources=("draft",) * len(kept), scores=kept
        )
        most = -(-hardware.max_num_seqs // hardware.gpus)
        batches = [self._step(count) for count in range(most + 1)]
        # Each stage works on another batch meanwhile, so a batch is a share of the requests.
        self.steps = [batches[-(-count // hardware.gpus)] for count in range(hardware.max_num_seqs + 1)]

    def _step(self, count: int) -> Step:
        costs, hardware = self._hardware.costs, self._hardware
        hops_s = (hardware.gpus - 1) * hardware.hop_s
        load = Load(rows=count, requests=count, keys=_CONTEXT * count, row_keys=_CONTEXT * count)
        rows = self._budget.prompt_rows(load, hardware.max_batched_tokens, _CONTEXT // 2)
        chunk = Load(rows=rows, requests=1, keys=_CONTEXT // 2, row_keys=rows * _CONTEXT // 2)
        if not count:
            return Step(tokens=1.0, nodes=0, base_s=hops_s, key_s=0.0, prompt_rows=rows, prompt_s=costs.seconds(chunk))
        trees = self._budget.choose([self._tree] * count, load, load)
        nodes = sum(map(len, trees))
        accepted = sum(probability for tree in trees for probability in tree.scores)
        load = load.plus(nodes)
        bare = costs.seconds(Load(rows=load.rows, requests=count, keys=0))
        both = costs.seconds(load.plus_request(rows, _CONTEXT // 2))
        return Step(
            tokens=1 + accepted / count,
            nodes=nodes,
            base_s=bare + hops_s,
            key_s=(costs.seconds(load) - bare) / load.keys,
            prompt_rows=rows,
            prompt_s=both - costs.seconds(load),
        )
