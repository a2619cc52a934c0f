"""A draft model's causal language model, computed by the target's own kernels.

Its rows need not be committed. The caller names the slot of each row and the slots that it sees, so a tree can grow over
several passes, and any part of it can be dropped. No token is chosen here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from services.model_files.weights.shared import read_shared
from services.verifier.checks.guard import check_slice
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.attention_kernel import PlacedRows
from services.verifier.kv_cache.pool import BLOCK
from services.verifier.model.slice import ModelSlice
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Rows of the pool at first; it doubles when they are used up.
_FIRST = 1024


class SideModel:
    """The model in ``folder``, in float32 over weights as they are stored. Everything runs in one thread.

    Args:
        target: folder of the model with which it may share weights.
        outputs: the tokens whose logits are computed, ascending; None: all.
        dtype: int8 rounds the weights to eight bits; otherwise they are as stored.

    Raises:
        ConfigurationError: it cannot be computed by the target's kernels; says why.
    """

    def __init__(
        self, folder: Path, target: Path, outputs: Sequence[int] | None, *, dtype: Literal["float32", "int8"] = "float32"
    ) -> None:
        config = TargetConfig(
            model_path=str(folder),
            shared_with=target if read_shared(folder) is not None else None,
            weights="as_stored",
            dtype=dtype,
            kv_cache_tokens=_FIRST,
            threads=torch.get_num_threads(),
        )
        self._part = ModelSlice(config, 0, outputs=outputs)
        if not self._part.takes_placed:
            raise ConfigurationError("its layers do not all attend by the native kernel")
        check_slice(self._part)
        pool = self._part.pool
        self._free = list(range(pool.total_blocks))
        self._held: dict[str, list[int]] = {}
        self._block_bytes = sum(
            keys[0].nbytes + values[0].nbytes for keys, values in zip(pool.keys, pool.values, strict=True)
        )
        self._made = 0

    def new_owner(self) -> str:
        """A name for an owner of rows, which has none yet."""
        self._made += 1
        return str(self._made)

    def reserve(self, owner: str, rows: int) -> None:
        """Have slots for ``rows`` rows of ``owner``."""
        pool, held = self._part.pool, self._held.setdefault(owner, [])
        missing = -(-rows // BLOCK) - len(held)
        if missing <= 0:
            return
        if missing > len(self._free):
            blocks = max(2 * pool.total_blocks, pool.total_blocks + missing)
            self._free += range(pool.total_blocks, blocks)
            pool.grow(blocks)
        taken, self._free = self._free[:missing], self._free[missing:]
        held += taken
        pool.assign(owner, taken, len(taken))

    def release(self, owner: str) -> None:
        """Drop all rows of ``owner``, and their slots."""
        self._free += self._held.pop(owner, [])
        self._part.pool.forget(owner)

    def nbytes(self, owner: str) -> int:
        """Bytes of the slots of ``owner``."""
        return len(self._held.get(owner, ())) * self._block_bytes

    def move(self, owner: str, slots: Sequence[int], first: int) -> None:
        """Move rows from ``slots``, ascending, to the slots from ``first`` on."""
        self._part.pool.move(owner, slots, first)

    def logits(self, batch: Sequence[PlacedRows], tokens: Sequence[int], chosen: Sequence[int]) -> torch.Tensor:
        """One pass over the rows of several owners, whose slots are reserved.

        Args:
            tokens: of all rows, one after the other.
            chosen: indices of the rows whose logits are wanted.

        Returns:
            [chosen, outputs], float32.
        """
        return self._part.run_placed(batch, tokens, chosen)
