"""Which attention a GPU's target uses: our Triton kernels where they take the model, else torch's fused one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

# As ``triton_buckets``.
MakeBuckets = Callable[[KVPool], "TritonBuckets"]

# Rows of the passes that show whether the kernels run: few and many have blocks of different sizes.
_TRIAL_ROWS = (3, 34)


def refusal(
    calls: Sequence[Call],
    dtype: torch.dtype,
    device: torch.device,
    *,
    capability_of: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
    find: Callable[[str], object] = find_spec,
) -> str:
    """Why our Triton kernels are not used; empty if they are.

    Args:
        dtype: of keys and values.
        capability_of: a GPU's compute capability.
        find: finds an installed package, or gives None.
    """
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find("triton") is None:
        return "triton is not installed"
    from services.verifier.kernels.triton.tree_pass import refusal as of_kernels

    return of_kernels(calls, dtype, capability_of(device))


def triton_buckets(pool: KVPool) -> TritonBuckets:
    """The passes of our Triton kernels over a cache."""
    from services.verifier.kernels.triton.tree_pass import TritonBuckets

    return TritonBuckets(pool)


def trial(calls: Sequence[Call], dtype: torch.dtype, device: torch.device, buckets: MakeBuckets) -> str:
    """Why the kernels do not run here, such as for want of a C compiler; empty if a pass over each kind of call does."""
    kinds = {(call.kv_heads, call.share, call.key_size, call.value_size): replace(call, entry=0) for call in calls}
    try:
        for call, rows in itertools.product(kinds.values(), _TRIAL_ROWS):
            batch = [Rows(request_id="trial", context=0, tokens=(0,) * rows, parents=(-1, 0), logits=3)]
            pool = KVPool([call], rows=1, dtype=dtype, device=device, whole_rows=True)
            pool.assign("trial", [0], 0)
            query, key, value = (
                torch.zeros(heads, rows, size, dtype=dtype, device=device)
                for heads, size in (
                    (call.heads, call.key_size), (call.kv_heads, call.key_size), (call.kv_heads, call.value_size)
                )
            )  # fmt: skip
            # Copied, so that failures on the GPU show here.
            buckets(pool).launched(batch, 0).attend(call, query, key, value).cpu()
    except Exception as error:
        # Compilers and drivers may fail in any way.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuAttention:
    """By what attention on a GPU is tried and made.

    Attributes:
        refusal, trial: see the functions of these names.
        pool: makes the KV cache.
        buckets: see ``triton_buckets``.
    """

    refusal: Callable[[Sequence[Call], torch.dtype, torch.device], str] = refusal
    trial: Callable[[Sequence[Call], torch.dtype, torch.device, MakeBuckets], str] = trial
    pool: Callable[..., KVPool] = KVPool
    buckets: MakeBuckets = triton_buckets

    def unusable(self, calls: Sequence[Call], dtype: torch.dtype, device: torch.device) -> str:
        """Why Triton's kernels cannot be used; empty if they can."""
        return self.refusal(calls, dtype, device) or self.trial(calls, dtype, device, self.buckets)


GPU_ATTENTION = GpuAttention()


def pool_and_buckets(
    calls: Sequence[Call],
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    wanted: AttentionBackend = "auto",
    means: GpuAttention = GPU_ATTENTION,
) -> tuple[KVPool, TritonBuckets | None]:
    """The KV cache in the layout that the device's attention reads, and how passes are laid out for Triton if it is used.

    Args:
        rows: of the cache.
        wanted: the setting ``attention_backend``.

    Raises:
        ConfigurationError: Triton is wanted, but does not take the model or does not run here; says why.
    """
    reason = "verifier.attention_backend is torch" if wanted == "torch" else means.unusable(calls, dtype, device)
    if reason and wanted == "triton":
        raise ConfigurationError(f"{reason}; use auto or torch", field="verifier.attention_backend", value="triton")
    pool = means.pool(calls, rows=rows, dtype=dtype, device=device, whole_rows=not reason)
    if reason:
        if device.type == "cuda":
            log.warning("attention by torch's own kernels, which are slower and not exact: %s", reason)
        return pool, None
    log.info("attention by Triton kernels: rows of trees are summed up as in plain decoding")
    return pool, means.buckets(pool)
