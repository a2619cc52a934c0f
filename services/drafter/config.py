"""Settings of a drafter: one small object per source."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupConfig:
    """Prompt lookup; the names are vLLM's.

    Attributes:
        prompt_lookup_max: longest n-gram that is looked up.
        prompt_lookup_min: shortest.
        max_branches: most earlier occurrences that are followed at once.
    """

    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    max_branches: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixConfig:
    """Suffix decoding; names as vLLM's where it has them.

    Attributes:
        depth: longest stretch of tokens that is counted.
        max_endings: endings of the text, of different lengths, that are followed at once.
        max_cached_tokens: of earlier answers, for each tenant; 0: a request learns from itself alone, and nothing that a
            tenant was told is kept.
        max_tenants: whose answers are kept; the one unused longest is forgotten first.
    """

    depth: int = 16
    max_endings: int = 4
    max_cached_tokens: int = 0
    max_tenants: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Token recycling.

    Attributes:
        max_tenants: whose tables are kept; the one unused longest is forgotten first.
    """

    max_tenants: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter.

    Attributes:
        max_sessions: most sessions kept; the ones unused longest are dropped first.
    """

    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    recycling: RecyclingConfig = field(default_factory=RecyclingConfig)
    max_sessions: int = 1024
