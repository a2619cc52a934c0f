"""Limits of the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """Limits of the loop.

    Attributes:
        max_num_seqs: most requests decoded at once.
        max_waiting: most requests in the waiting queue; further ones are refused.
        max_wait_s: longest time in it; a request that is expected to wait longer is refused at once. None: any time.
        max_batched_tokens: most prompt tokens in one pass, over all requests.
        draft_deadline_s: longest time that a step waits for drafts, where waiting pays.
        pass_deadline_s: a pass hangs if it takes longer than this and far longer than recent passes.
        idle_beat_s: how often a target of several stages is asked whether it is all there while there is nothing to decode.
        kept_feature_bytes: most bytes of hidden states kept for drafters that join late, over all live requests.
    """

    max_num_seqs: int = 16
    max_waiting: int = 256
    max_wait_s: float | None = None
    max_batched_tokens: int = 256
    draft_deadline_s: float = 0.025
    pass_deadline_s: float = 60.0
    idle_beat_s: float = 5.0
    kept_feature_bytes: int = 256 << 20
