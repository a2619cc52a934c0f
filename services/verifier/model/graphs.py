"""CUDA graphs of small passes. Replaying a graph saves launching kernels one by one, so a pass costs its memory reads only.

Where capturing fails, ``Graphs`` launches the kernels itself, or refuses to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from services.machine.captured import Capture, Capturing, Copies, Graph, captured, is_memory
from services.verifier.attention.calls import Pass
from services.verifier.attention.fixed import Buckets, FixedPass, Largest
from services.verifier.model.target_port import Rows
from services.verifier.model.tree_rows import sizes_of
from speculation.errors import ConfigurationError

# Hidden states of all rows, by layer.
Seen = Mapping[int, torch.Tensor]
# Copies a layer's hidden states of all rows to where they stay until the next pass.
Keep = Callable[[int, torch.Tensor], torch.Tensor]


class Made(NamedTuple):
    """What a pass makes.

    Attributes:
        rows: the model's output, [rows, ...].
        seen: hidden states of layers that are kept.
        likeliest: [rows], of rows of logits what ``choosing.greatest`` finds; None: it was not looked for.
    """

    rows: torch.Tensor
    seen: Seen
    likeliest: torch.Tensor | None = None


# Runs the model over a pass, and keeps hidden states of layers. The tensor holds the pass's tokens, [rows], or its hidden
# states, [rows, hidden size].
RunModel = Callable[[Pass, torch.Tensor, Sequence[int], Keep], Made]
# Runs a pass that is laid out, over the rows of the stage before, [rows, hidden size]; None: over its tokens. The next pass
# may overwrite what it makes.
Replay = Callable[[torch.Tensor | None], Made]
# Not layers: what the model makes, and the likeliest tokens.
_OUTPUT, _LIKELIEST = -1, -2


@dataclass(kw_only=True, slots=True)
class _Captured:
    """A bucket's buffers and its graph; without a graph, kernels are launched one by one."""

    laid_out: FixedPass
    given: torch.Tensor
    layers: tuple[int, ...]
    made: Made | None = None
    graph: Graph | None = None


class Graphs:
    """One graph for every bucket of passes, and for every set of layers that are kept.

    Args:
        buckets: which passes share a graph, and how they are laid out.
        run: runs the model; what it launches must not depend on a pass's contents.
        given: an empty tensor of the type and width of the rows that ``run`` gets: [0] token ids, or [0, hidden size].
        required: the kernels that the settings name, with which a pass that cannot be captured is refused; empty: it is
            launched.
        capture: captures what a function launches; None: as ``captured`` on a GPU, and nothing elsewhere.
    """

    def __init__(
        self,
        buckets: Buckets,
        run: RunModel,
        given: torch.Tensor,
        *,
        required: str = "",
        capture: Capture[Made] | None = None,
    ) -> None:
        self._kind = buckets
        self._run = run
        self._given = given
        self._buckets: dict[tuple[Hashable, tuple[int, ...]], _Captured] = {}
        # The sets of layers that were captured, the smallest first.
        self._layers: list[tuple[int, ...]] = []
        if capture is None and given.device.type == "cuda":
            # Only one graph runs at a time, so all share the memory of intermediate results.
            capture = partial(captured, memory=torch.cuda.graph_pool_handle())
        self._capturing = Capturing(capture, "passes of this model", required)
        # Of what graphs make, and of hidden states by layer.
        self._copied = Copies()

    def capture(self, largest: Largest, layers: Iterable[tuple[int, ...]]) -> int:
        """Capture all passes up to ``largest``, once for each set of ``layers`` that are kept; returns the number of graphs.

        Later none is captured: a pass that no graph holds is launched.

        Raises:
            ConfigurationError: there is not enough memory, or graphs are required and the model cannot be captured; says
                what to do.
        """
        self._layers = sorted(set(layers), key=len)
        keys = self._kind.allowed(largest)
        for done, (key, own) in enumerate((key, own) for key in keys for own in reversed(self._layers)):
            try:
                self._buckets[key, own] = self._captured(key, own)
            except Exception as error:
                if not is_memory(error):
                    raise
                raise ConfigurationError(
                    f"not enough GPU memory to capture passes of up to {largest.rows} rows, {largest.requests} requests and "
                    f"{largest.positions} positions: it ended after {done} of {len(keys) * len(self._layers)} graphs; lower "
                    "verifier.gpu_memory_utilization, verifier.kv_cache_tokens, verifier.max_model_len or "
                    "verifier.max_num_seqs",
                    about="verifier.kv_cache_tokens",
                ) from error
        return sum(each.graph is not None for each in self._buckets.values())

    def lay_out(self, batch: Sequence[Rows], layers: tuple[int, ...] = ()) -> Replay | None:
        """Lay out a pass. Returns what runs it, at most once and before the next is laid out; None if no graph holds it.

        Args:
            layers: those whose hidden states are made, at the least, their padding included.
        """
        kept = next((own for own in self._layers if set(own) >= set(layers)), None)
        bucket = None if kept is None else self._buckets.get((self._kind.bucket(batch), kept))
        if bucket is None:
            return None
        bucket.laid_out.fill(batch)
        return partial(self._replay, bucket, sum(sizes_of(batch)))

    def _replay(self, bucket: _Captured, rows: int, hidden: torch.Tensor | None) -> Made:
        if hidden is not None:
            bucket.given[:rows].copy_(hidden)
        if bucket.graph is not None:
            bucket.graph.replay()
            assert bucket.made is not None
            made = bucket.made
        else:
            made = self._launched(bucket)
        return Made(made.rows[:rows], made.seen, None if made.likeliest is None else made.likeliest[:rows])

    def _launched(self, bucket: _Captured) -> Made:
        bucket.laid_out.enter()
        if self._given.dim() == 1:
            # With its padding, whose rows are all alike then: in a mixture they choose the same few experts.
            bucket.given.copy_(bucket.laid_out.tokens)
        return self._run(bucket.laid_out, bucket.given, bucket.layers, self._copied)

    def _captured(self, key: Hashable, layers: tuple[int, ...]) -> _Captured:
        laid_out = self._kind.make(key)
        given = self._given.new_zeros(len(laid_out.tokens), *self._given.shape[1:])
        made = _Captured(laid_out=laid_out, given=given, layers=layers)
        if self._capturing.on:
            self._capture(made)
        return made

    def _capture(self, bucket: _Captured) -> None:
        """Capture an empty pass."""
        bucket.laid_out.fill([])

        def run() -> Made:
            made = self._launched(bucket)
            likeliest = None if made.likeliest is None else self._copied(_LIKELIEST, made.likeliest)
            return Made(self._copied(_OUTPUT, made.rows), made.seen, likeliest)

        if (found := self._capturing.of(run)) is not None:
            bucket.graph, bucket.made = found
