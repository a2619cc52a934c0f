"""Settings of the retrieval service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from services.settings import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalConfig:
    """Where the index comes from: a folder, which never changes, or its live version in Redis. One of the two.

    Attributes:
        cache_dir: where versions from Redis are kept; the last live one serves when Redis is gone at start.
        state_width: numbers of the served model's hidden states, where they will be looked up: indexes without such are
            refused.
        tokenizer_sha256: of the served model; indexes for another are refused. None: do not ask.
    """

    index: Annotated[Path | None, Setting("folder of an index that `outrider index build` made")] = None
    redis_url: Annotated[
        str | None,
        Setting("redis:// or rediss:// URL where versions of an index are published; the live one is followed"),
    ] = None
    redis_password: Annotated[
        str | None,
        Setting(
            "password of that Redis, where the URL holds none; to be set in the environment or a file alone", secret=True
        ),
    ] = field(default=None, repr=False)
    name: Annotated[str, Setting("name of the index in Redis", pattern="^[A-Za-z0-9._-]{1,64}$")] = "default"
    cache_dir: Path = Path("indexes")
    state_width: int | None = None
    tokenizer_sha256: str | None = None
