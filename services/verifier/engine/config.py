"""Bounds of the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Bounds of the loop.

    Attributes:
        max_num_seqs: most requests decoded at once.
        max_waiting: most requests that wait for room; more are refused.
        max_batched_tokens: most prompt rows of one pass, over all requests.
        draft_deadline_s: longest that a step waits for drafts.
    """

    max_num_seqs: int = 16
    max_waiting: int = 256
    max_batched_tokens: int = 256
    draft_deadline_s: float = 0.025
