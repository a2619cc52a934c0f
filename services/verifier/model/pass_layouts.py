"""How a slice's passes are laid out: for our attention on GPUs, for our attention on CPUs, or for torch's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.verifier.attention.calls import MAX_NODES, Pass
from services.verifier.attention.static import StaticBuckets
from services.verifier.attention.tiled import TiledPass
from services.verifier.kernels.native import attention_kernel as native_attention
from services.verifier.kernels.native.attention_kernel import PlacedRows
from services.verifier.kernels.native.library import Library
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.lora_adapters import LoraAdapters
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.verifier.kernels.triton.tree_pass import TritonBuckets


class PassLayouts:
    """Lays passes out over a KV cache.

    Args:
        triton: lays them out for Triton's kernels; None: these do not attend.
        library: our kernels for CPUs, which attend if they can; None: they may not.

    Attributes:
        kernel: attends on a CPU; None: it cannot, or may not.
    """

    def __init__(self, pool: KVPool, triton: TritonBuckets | None, library: Library | None) -> None:
        self._pool, self.triton = pool, triton
        self.kernel = native_attention.kernel_for(library if triton is None else None, pool)

    @property
    def buckets(self) -> TritonBuckets | StaticBuckets:
        """Layouts that lie still, for captured passes."""
        return self.triton or StaticBuckets(self._pool)

    def of(
        self,
        batch: Sequence[Rows],
        padding: int,
        stream_rows: Sequence[int] | None = None,
        adapters: LoraAdapters | None = None,
    ) -> Pass:
        """A batch, followed by ``padding`` rows that belong to no request.

        Args:
            stream_rows: of each entry, the number of its stream rows, its last rows.

        Raises:
            ValueError: a tree has more than ``MAX_NODES`` nodes.
        """
        if (largest := max(len(rows.parents) for rows in batch)) > MAX_NODES:
            raise ValueError(f"a tree of {largest} nodes: at most {MAX_NODES}")
        if self.triton is not None:
            return self.triton.launched(batch, padding, stream_rows)
        if self.kernel is not None:
            laid_out = native_attention.lay_out(self.kernel, self._pool, batch, padding, stream_rows)
            if adapters is not None:
                laid_out.adapted = adapters.rows_of(batch, stream_rows)
            return laid_out
        return TiledPass(self._pool, batch, padding, stream_rows)

    def round_rows(self, rows: int) -> None:
        """Have ``rows`` rows in the cache from now on, rounded. No block may be in use.

        Raises:
            ConfigurationError: what attends does not round them, or heads have an odd number of numbers, which GPUs read in
                pairs.
        """
        odd = any(size % 2 for call in self._pool.calls for size in (call.key_size, call.value_size))
        if self._pool.calls and ((self.kernel is None and self.triton is None) or odd):
            reason = "our own attention, which alone rounds keys and values, does not take this model; use auto"
            raise ConfigurationError(reason, field="verifier.kv_cache_dtype", value="fp8")
        self._pool.round_rows(rows)

    def of_placed(self, batch: Sequence[PlacedRows]) -> Pass:
        """Rows whose places in the cache are given; for our attention on a CPU."""
        assert self.kernel is not None
        return native_attention.lay_out_placed(self.kernel, self._pool, batch)
