"""Settings of the retrieval service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from services.patterns import NAME
from services.settings import Setting
from speculation.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersConfig:
    """Tenants' earlier answers in Redis, from which all drafters of a service draft."""

    max_tokens: Annotated[
        int,
        Setting(
            "tokens of earlier answers that are kept in Redis for each API key, for its own requests alone, and shared by "
            "all drafters; 0: none. About 5 bytes each; drafter.suffix_cached_tokens of them are in a drafter's memory",
            name="answers_tokens",
            ge=0,
            le=100_000_000,
        ),
    ] = 0
    kept_s: Annotated[
        float, Setting("seconds after which an answer of answers_tokens is deleted", name="answers_s", gt=0, le=31_536_000)
    ] = 86_400.0
    key: Annotated[
        str | None,
        Setting(
            "secret with which answers are encrypted in Redis; to be set in the environment or a file alone; null: they are "
            "kept in clear",
            name="answers_key",
            secret=True,
        ),
    ] = field(default=None, repr=False)

    def check(self, redis_url: str | None, in_memory: int) -> None:
        """Check that answers can be kept, where they are to be.

        Args:
            in_memory: drafter.suffix_cached_tokens.

        Raises:
            ConfigurationError: there is no Redis for them, drafters would take none, or there is a secret for none.
        """
        if self.key is not None and not self.max_tokens:
            raise ConfigurationError(
                "set both or neither", field="retrieval.answers_key", value="set", given="but not retrieval.answers_tokens"
            )
        for name, value in {"retrieval.redis_url": redis_url, "drafter.suffix_cached_tokens": in_memory}.items():
            if self.max_tokens and not value:
                raise ConfigurationError(
                    f"set {name}", field="retrieval.answers_tokens", value=self.max_tokens, given=f"but {name} is not set"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalConfig:
    """Where the index comes from: a folder, which never changes, or its live version in Redis. One of the two.

    Attributes:
        answers: what is kept in that Redis of earlier answers.
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
    name: Annotated[str, Setting("name of the index in Redis", pattern=NAME)] = "default"
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    cache_dir: Path = Path("indexes")
    state_width: int | None = None
    tokenizer_sha256: str | None = None
