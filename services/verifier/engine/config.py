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
        draft_deadline_s: longest that a step waits for drafts, if it pays.
        pass_deadline_s: a pass that takes so long, and many times as long as others of late, hangs.
        kept_feature_bytes: hidden states of live requests that are kept for drafters which join late, all together.
    """

    max_num_seqs: int = 16
    max_waiting: int = 256
    max_batched_tokens: int = 256
    draft_deadline_s: float = 0.025
    pass_deadline_s: float = 60.0
    kept_feature_bytes: int = 256 << 20
