"""Settings of the retrieval service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalConfig:
    """Where the index comes from: a folder, or its live version in Redis. One of the two.

    Attributes:
        folder: of a built index; never changes.
        redis_url: where versions are published; the live one is followed.
        redis_password: of that Redis, if the URL holds none.
        name: of the index in Redis.
        cache_dir: where versions from Redis are kept; the last live one serves when Redis is gone at start.
        state_width: numbers of the served model's hidden states, where they will be looked up: indexes without such are
            refused.
        tokenizer_sha256: of the served model; indexes for another are refused. None: do not ask.
    """

    folder: Path | None = None
    redis_url: str | None = None
    redis_password: str | None = field(default=None, repr=False)
    name: str = "default"
    cache_dir: Path = Path("indexes")
    state_width: int | None = None
    tokenizer_sha256: str | None = None
