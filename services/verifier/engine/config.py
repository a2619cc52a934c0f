"""Limits of the decoding loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from services.settings import Setting
from speculation import limits

# Most prompt tokens in a pass where no setting says it. On a GPU rows are cheap until its units are full.
PROMPT_ROWS, PROMPT_ROWS_ON_GPU = 256, 2048


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Limits of the loop.

    Attributes:
        idle_beat_s: how often a target of several processes is asked whether it is all there while there is nothing to
            decode.
        headroom: rows kept free for each running request when a new one is admitted, so that an admission does not cause a
            preemption soon after.
        forget_within_s: longest wait for drafters' word that they have forgotten a tenant. Less than the caller's own
            timeout, so that the caller learns who has not answered.
    """

    max_num_seqs: Annotated[
        int,
        Setting("most requests that are decoded at once; each takes rows of the KV cache and a place in every batch", ge=1),
    ] = 16
    max_waiting: Annotated[
        int,
        Setting("most requests in the waiting queue; further ones get RESOURCE_EXHAUSTED and a hint when to retry", ge=0),
    ] = 1024
    max_wait_s: Annotated[
        float | None,
        Setting(
            "longest wait in that queue, in seconds: a request that is expected to wait longer is refused at once, one that "
            "did, then; null: any time",
            gt=0,
            le=86_400,
        ),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        Setting(
            "most prompt tokens in one pass, over all requests: with more, a prompt takes fewer passes, and each takes "
            f"longer; null: {PROMPT_ROWS_ON_GPU} on a GPU, {PROMPT_ROWS} on a CPU",
            ge=1,
        ),
    ] = None
    draft_deadline_s: Annotated[
        float, Setting("longest wait of a step for drafts, in seconds, where waiting pays", ge=0, le=10)
    ] = 0.025
    named_deadline_s: Annotated[
        float,
        Setting("longest wait of a step for drafts of requests whose effort is paper, in seconds", ge=0, le=60),
    ] = 1.0
    named_share: Annotated[
        float,
        Setting(
            "share of the time of passes that requests whose effort is paper may add for the other requests in them: by "
            "waits, and by rows that do not pay",
            ge=0,
            le=10,
        ),
    ] = 0.05
    pass_deadline_s: Annotated[
        float,
        Setting("seconds after which a pass counts as hung, if it also takes far longer than recent passes", gt=0),
    ] = 60.0
    idle_beat_s: float = 5.0
    headroom: int = 64
    forget_within_s: float = limits.FORGET_S / 2
    kept_feature_bytes: Annotated[
        int,
        Setting("most bytes of hidden states kept for drafters that join late, over all live requests", ge=0),
    ] = 256 << 20

    def prompt_rows(self, device: str = "cpu") -> int:
        """Most prompt tokens in one pass of a target on ``device``."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        return PROMPT_ROWS if device == "cpu" else PROMPT_ROWS_ON_GPU
