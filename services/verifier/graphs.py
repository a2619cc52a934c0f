"""CUDA graphs of small passes. Replaying a graph saves launching kernels one by one, so a pass costs its memory reads only.

Not run on a GPU yet (docs/gpus.md). Where capturing fails, ``Graphs`` launches the kernels itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.verifier.attention.calls import Pass
from services.verifier.attention.fixed import Buckets, FixedPass
from services.verifier.target_port import Rows

log = logging.getLogger(__name__)

_WARM_UP = 2

# Hidden states of all rows, by layer.
Seen = Mapping[int, torch.Tensor]
# Runs the model over a pass, and keeps hidden states of layers. The tensor holds the pass's tokens, [rows], or its hidden
# states, [rows, hidden size].
RunModel = Callable[[Pass, torch.Tensor, Sequence[int]], tuple[torch.Tensor, Seen]]


@dataclass(kw_only=True, slots=True)
class _Captured:
    """A bucket's buffers and its graph; without a graph, kernels are launched one by one."""

    laid_out: FixedPass
    given: torch.Tensor
    layers: tuple[int, ...]
    made: tuple[torch.Tensor, Seen] | None = None
    graph: torch.cuda.CUDAGraph | None = None


class Graphs:
    """One graph for every bucket of passes and every set of layers that are kept, captured when first needed.

    Args:
        buckets: which passes share a graph, and how they are laid out.
        run: runs the model; what it launches must not depend on a pass's contents.
        given: an empty tensor of the type and width of the rows that ``run`` gets: [0] token ids, or [0, hidden size].
    """

    def __init__(self, buckets: Buckets, run: RunModel, given: torch.Tensor) -> None:
        self._kind = buckets
        self._run = run
        self._given = given
        self._buckets: dict[tuple[Hashable, tuple[int, ...]], _Captured] = {}
        self._captures = given.device.type == "cuda"
        # Only one graph runs at a time, so all share the memory of intermediate results.
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def run(
        self, batch: Sequence[Rows], hidden: torch.Tensor | None, layers: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, Seen] | None:
        """The model's output for the pass, [rows, ...], and the hidden states of ``layers``, padding included.

        The next pass may overwrite them. None if the pass is too large.
        """
        rows = sum(len(request.tokens) for request in batch)
        key = self._kind.bucket(batch)
        if key is None:
            return None
        bucket = self._bucket(key, layers)
        bucket.laid_out.fill(batch)
        bucket.given[:rows].copy_(bucket.laid_out.tokens[:rows] if hidden is None else hidden)
        if bucket.graph is not None:
            bucket.graph.replay()
            assert bucket.made is not None
            made, seen = bucket.made
        else:
            made, seen = self._run(bucket.laid_out, bucket.given, layers)
        return made[:rows], seen

    def _bucket(self, key: Hashable, layers: tuple[int, ...]) -> _Captured:
        found = self._buckets.get((key, layers))
        if found is None:
            laid_out = self._kind.make(key)
            given = self._given.new_zeros(len(laid_out.tokens), *self._given.shape[1:])
            found = _Captured(laid_out=laid_out, given=given, layers=layers)
            if self._captures:
                self._capture(found)
            self._buckets[key, layers] = found
        return found

    def _capture(self, bucket: _Captured) -> None:
        """Run an empty pass until everything is warm, then capture it."""
        bucket.laid_out.fill([])
        try:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self._run(bucket.laid_out, bucket.given, bucket.layers)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                bucket.made = self._run(bucket.laid_out, bucket.given, bucket.layers)
            bucket.graph = graph
        except RuntimeError as error:
            log.warning("passes of this model cannot be captured, so each takes longer: %s", error)
            self._captures = False
