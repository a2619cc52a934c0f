"""Settings of a drafter: one small object per source."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


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
        max_tokens: of a request's own text, the latest, in which endings are looked for.
        max_cached_tokens: of earlier answers, for each tenant; 0: a request learns from itself alone, and nothing that a
            tenant was told is kept.
        cached_s: seconds after which an earlier answer is forgotten.
        max_tenants: whose answers are kept; the one unused longest is forgotten first.
    """

    depth: int = 16
    max_endings: int = 4
    max_tokens: int = 65_536
    max_cached_tokens: int = 0
    cached_s: float = 3600.0
    max_tenants: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Token recycling.

    Attributes:
        max_tenants: whose tables are kept; the one unused longest is forgotten first.
        max_entries: of a table; what was learnt longest ago is dropped first.
        snapshot: file of successors that every table begins with, or None.
    """

    max_tenants: int = 64
    max_entries: int = 50_000
    snapshot: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnpdConfig:
    """ANPD.

    Attributes:
        max_order: longest n-gram that is counted, its last token included.
    """

    max_order: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """Lookahead decoding.

    Attributes:
        ngram: N, length of the n-grams that the window yields.
        window: W, its columns.
        guesses: G, n-grams that are kept for a token, and checked at once.
    """

    ngram: int = 5
    window: int = 15
    guesses: int = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class SpectraConfig:
    """SPECTRA.

    Attributes:
        ngram: N, length of the n-grams that are entered into the dictionaries.
        window: W, columns of the candidate window; 0: none.
        guesses: G, continuations that are kept for a token, and checked at once.
        explore_prob: how often a column takes a token that the forward dictionary does not know yet.
        forward, backward, sub_ngrams: what the paper's Table 2 takes away, one at a time.
    """

    ngram: int = 5
    window: int = 15
    guesses: int = 15
    explore_prob: float = 0.1
    forward: bool = True
    backward: bool = True
    sub_ngrams: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter.

    Attributes:
        max_sessions: most sessions kept; the ones unused longest are dropped first.
        calibration: file that what is learnt of the sources is kept in, or None; it holds no text.
        retrieval_deadline_s: longest that a draft waits for the retrieval index.
        draft_ahead: outcomes of a step for which the next draft is sent beforehand.
    """

    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    recycling: RecyclingConfig = field(default_factory=RecyclingConfig)
    anpd: AnpdConfig = field(default_factory=AnpdConfig)
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    spectra: SpectraConfig = field(default_factory=SpectraConfig)
    max_sessions: int = 1024
    calibration: Path | None = None
    retrieval_deadline_s: float = 0.01
    draft_ahead: int = 0
