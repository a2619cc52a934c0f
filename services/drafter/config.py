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
class DrafterConfig:
    """A drafter.

    Attributes:
        max_sessions: most sessions kept; the ones unused longest are dropped first.
    """

    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    max_sessions: int = 1024
