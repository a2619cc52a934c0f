"""When a KV cache begins to be rounded: what reads it is compared with transformers' own attention before."""

from __future__ import annotations

from services.verifier.kv_cache.pool import KVPool
from speculation.errors import ConfigurationError

# Of a pool that is to be rounded: rows that it has while what reads it is compared.
COMPARED_ROWS = 512


def round_rows(reader: object | None, pool: KVPool, rows: int) -> None:
    """Have ``rows`` rows in a pool from now on, rounded. No block may be in use.

    Args:
        reader: our own attention, for a CPU or a GPU; None: others read keys and values.

    Raises:
        ConfigurationError: they do not round them, or heads have an odd number of numbers, which GPUs read in pairs.
    """
    odd = any(size % 2 for call in pool.calls for size in (call.key_size, call.value_size))
    if pool.calls and (reader is None or odd):
        reason = "our own attention, which alone rounds keys and values, does not take this model; use auto"
        raise ConfigurationError(reason, field="verifier.kv_cache_dtype", value="fp8")
    pool.round_rows(rows)
