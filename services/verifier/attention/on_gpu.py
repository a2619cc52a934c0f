"""Which attention a GPU's target uses: our Triton kernels where they take the model, else torch's fused one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from services.verifier.attention.calls import Call
from services.verifier.config import AttentionBackend
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

log = logging.getLogger(__name__)

# Rows of the passes that show whether the kernels run: few and many have blocks of different sizes.
_TRIAL_ROWS = (3, 34)


def refusal(calls: Sequence[Call], dtype: torch.dtype, device: torch.device) -> str:
    """Why our Triton kernels are not used; empty if they are. ``dtype``: of keys and values."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    from services.verifier.kernels.triton.tree_pass import refusal as of_kernels

    return of_kernels(calls, dtype, torch.cuda.get_device_capability(device))


def pool_and_buckets(
    calls: Sequence[Call], rows: int, dtype: torch.dtype, device: torch.device, wanted: AttentionBackend = "auto"
) -> tuple[KVPool, TritonBuckets | None]:
    """The KV cache in the layout that the device's attention reads, and how passes are laid out for Triton if it is used.

    Args:
        rows: of the cache.
        wanted: the setting ``attention_backend``.

    Raises:
        ConfigurationError: Triton is wanted, but does not take the model or does not run here; says why.
    """
    if wanted == "torch":
        reason = "verifier.attention_backend is torch"
    else:
        reason = refusal(calls, dtype, device) or _trial(calls, dtype, device)
    if reason and wanted == "triton":
        raise ConfigurationError(f"verifier.attention_backend is triton: {reason}; use auto or torch")
    pool = KVPool(calls, rows=rows, dtype=dtype, device=device, ones=bool(reason))
    if reason:
        if device.type == "cuda":
            log.warning("attention by torch's own kernels, which are slower and not exact: %s", reason)
        return pool, None
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    log.info("attention by Triton kernels: rows of trees are summed up as in plain decoding")
    # All calls of a pass have one layout; blocks of rows must be small enough for the call with most queries a key.
    return pool, TritonBuckets(pool, max(call.share for call in calls))


def _trial(calls: Sequence[Call], dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernels do not run here, such as for want of a C compiler; empty if a pass over each kind of call does."""
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    kinds = {(call.kv_heads, call.share, call.key_size, call.value_size): replace(call, entry=0) for call in calls}
    try:
        for call, rows in itertools.product(kinds.values(), _TRIAL_ROWS):
            batch = [Rows(request_id="trial", context=0, tokens=(0,) * rows, parents=(-1, 0), logits=3)]
            pool = KVPool([call], rows=1, dtype=dtype, device=device, ones=False)
            pool.assign("trial", [0], 0)
            query, key, value = (
                torch.zeros(heads, rows, size, dtype=dtype, device=device)
                for heads, size in (
                    (call.heads, call.key_size), (call.kv_heads, call.key_size), (call.kv_heads, call.value_size)
                )
            )  # fmt: skip
            # Copied, so that failures on the GPU show here.
            TritonBuckets(pool, call.share).launched(batch, 0).attend(call, query, key, value).cpu()
    except Exception as error:
        # Compilers and drivers may fail in any way.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
