"""One answer in progress: tokens go in; text, statistics and stop strings come out."""

from __future__ import annotations

import time

from services.api.messages import Completion, TextChunk, Timing
from services.router.stops import StopStrings
from services.router.tokens import Detokenizer
from speculation.messages import GenerationRequest, Progress
from speculation.types import FinishReason, SpeculationStats


class Answer:
    """Handles tokens one by one, so that a stop string within a step's tokens ends text, token ids, log-probabilities and
    counts at the same token.

    Args:
        request_id: what the user knows the request by.

    Attributes:
        stop_string: the stop string that ended the answer, if one did.
    """

    def __init__(self, request: GenerationRequest, request_id: str, detokenizer: Detokenizer, arrived_at: float) -> None:
        self._request = request
        self._request_id = request_id
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.sampling.stop)
        self._arrived_at = arrived_at
        self._first_token_at: float | None = None
        self._tokens = 0
        self._characters = 0
        self._queue_s = 0.0
        self._cached_tokens = 0
        self._last_token: int | None = None
        self._stats = SpeculationStats()
        self.stop_string: str | None = None

    def add(self, progress: Progress) -> TextChunk:
        """Take the tokens of one step; those after a completed stop string are dropped."""
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
            self._cached_tokens = progress.cached_tokens
        text, taken = "", 0
        ends: list[int] = []
        for token in progress.token_ids:
            taken += 1
            piece = self._detokenizer.push(token)
            self._characters += len(piece)
            ends.append(self._characters)
            if self._tokens + taken < self._request.sampling.min_tokens:
                text += piece
                continue
            found = self._stops.push(piece)
            text += found.text
            if found.stop is not None:
                self.stop_string = found.stop
                break
        self._tokens += taken
        self._queue_s = progress.queue_s
        self._last_token = progress.token_ids[taken - 1]
        self._stats.record(drafted=progress.num_drafted, accepted_sources=progress.accepted_sources[:taken], committed=taken)
        self._stats.switches += progress.switches
        return TextChunk(
            text=text,
            token_ids=progress.token_ids[:taken],
            logprobs=progress.logprobs[:taken],
            text_ends=tuple(ends),
        )

    def rest(self) -> str:
        """Text that was held back because a stop string might have begun in it. Called once, at the end."""
        if self.stop_string is not None:
            return ""
        found = self._stops.push(self._detokenizer.flush())
        return found.text + self._stops.flush()

    def complete(self, reason: FinishReason, model: str) -> Completion:
        """The final message of the answer."""
        now = time.perf_counter()
        stop: str | int | None = self.stop_string
        if stop is None and reason is FinishReason.STOP:
            stop = self._last_token
        return Completion(
            request_id=self._request_id,
            finish_reason=reason,
            stop=stop,
            prompt_token_ids=self._request.prompt,
            completion_tokens=self._tokens,
            cached_tokens=self._cached_tokens,
            predicted_tokens=len(self._request.prediction),
            seed=self._request.sampling.seed,
            model=model,
            strategy=self._request.plan.strategy,
            stats=self._stats,
            timing=Timing(
                queue_s=self._queue_s,
                time_to_first_token_s=(self._first_token_at or now) - self._arrived_at,
                total_s=now - self._arrived_at,
            ),
        )
