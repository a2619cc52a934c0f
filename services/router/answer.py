"""One answer in progress: tokens go in; text, statistics and stop strings come out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from services.api.messages import Completion, TextChunk, Timing
from services.router.detokenizer import Detokenizer
from services.router.token_origins import Origins
from speculation.messages import GenerationRequest, Progress
from speculation.types import FinishReason, SpeculationStats


class Answer:
    """Handles tokens one by one, so that a stop string within a step's tokens ends text, token ids, log-probabilities and
    counts at the same token.

    Args:
        request_id: what the user knows the request by.
        origins: what its chunks tell of drafts; None: nothing.
        named_stops: stop strings that are the names of tokens, by their ids.

    Attributes:
        stop_string: the stop string that ended the answer, if one did.
    """

    def __init__(
        self,
        request: GenerationRequest,
        request_id: str,
        detokenizer: Detokenizer,
        arrived_at: float,
        origins: Origins | None = None,
        named_stops: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._request = request
        self._named_stops = named_stops
        self._request_id = request_id
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.sampling.stop)
        self._arrived_at = arrived_at
        self._origins = origins
        self._first_token_at: float | None = None
        self._tokens = 0
        self._characters = 0
        self._queue_s = 0.0
        self._cached_tokens = 0
        self._last_token: int | None = None
        self._arithmetic = ""
        self._stats = SpeculationStats(num_spec_tokens=request.plan.max_nodes)
        self.stop_string: str | None = None

    def add(self, progress: Progress) -> TextChunk:
        """Take the tokens of one step; those after a completed stop string are dropped."""
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
            self._cached_tokens = progress.cached_tokens
        text, taken = "", 0
        begin, ends = self._characters, list[int]()
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
        self._arithmetic = progress.arithmetic or self._arithmetic
        self._last_token = progress.token_ids[taken - 1]
        self._stats.record(
            drafted=progress.num_drafted,
            accepted_sources=progress.accepted_sources[:taken],
            committed=taken,
            # Of the whole step, also where a stop string drops some of its tokens: what they alone saved is not known.
            seconds_saved=progress.saved_s,
        )
        self._stats.switches += progress.switches
        told = self._origins
        return TextChunk(
            text=text,
            token_ids=progress.token_ids[:taken],
            logprobs=progress.logprobs[:taken],
            prompt_logprobs=progress.prompt_logprobs,
            text_ends=tuple(ends),
            incomplete=self._detokenizer.incomplete,
            origins=() if told is None else told.of_tokens(progress.accepted_sources, begin, ends),
            passes=() if told is None else told.of_pass(progress.report, taken),
            arithmetic=progress.arithmetic,
            restarted=progress.restarted,
        )

    def rest(self) -> str:
        """Text that was held back because a stop string might have begun in it. Called once, at the end."""
        if self.stop_string is not None:
            return ""
        found = self._stops.push(self._detokenizer.flush())
        self.stop_string = found.stop
        return found.text + self._stops.flush()

    def complete(self, reason: FinishReason, model: str, rule: str = "", learnt: str = "") -> Completion:
        """The final message of the answer, which was planned by ``rule``, or for the reason ``learnt``, if so.

        Args:
            reason: why the verifier ended it; a stop string ends it before that.
        """
        now = time.perf_counter()
        reason = reason if self.stop_string is None else FinishReason.STOP
        stop: str | int | None = self.stop_string
        if stop is None and reason is FinishReason.STOP and self._last_token is not None:
            stop = self._named_stops.get(self._last_token, self._last_token)
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
            rule=rule,
            learnt=learnt,
            arithmetic=self._arithmetic,
            stats=self._stats,
            timing=Timing(
                queue_s=self._queue_s,
                time_to_first_token_s=(self._first_token_at or now) - self._arrived_at,
                total_s=now - self._arrived_at,
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Text that may be shown now, and the stop string that ended the answer, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Releases text only once it can no longer be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(map(_Stop, stops))
        self._held = ""

    def push(self, piece: str) -> Found:
        """Add ``piece``. At a complete stop string, the text before its first occurrence is released, the rest dropped."""
        text = self._held + piece
        hits = [(at, -len(stop.text), stop.text) for stop in self._stops if (at := text.find(stop.text)) >= 0]
        if hits:
            at, _, found = min(hits)
            self._held = ""
            return Found(text=text[:at], stop=found)
        keep = max((stop.begun_by(piece) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return Found(text=text[: len(text) - keep])

    def flush(self) -> str:
        """The text held back so far, for an answer that ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Stop:
    """A stop string, and how much of it the text so far ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._matched = 0
        # For each beginning of it: the longest shorter one with which that one ends.
        self._shorter = [0]
        for letter in text[1:]:
            self._shorter.append(self._longer(self._shorter[-1], letter))

    def begun_by(self, piece: str) -> int:
        """Characters at the end of the text, ``piece`` included, with which it begins. It does not occur in the text."""
        for letter in piece:
            self._matched = self._longer(self._matched, letter)
        return self._matched

    def _longer(self, matched: int, letter: str) -> int:
        """The longest beginning that the text ends with after ``letter``, if it ended with one of ``matched`` characters."""
        while matched and self.text[matched] != letter:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == letter)
