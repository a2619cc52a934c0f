"""An answer while it is made: each of its choices is gathered from chunks, and told as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from services.api.http.event_stream import EventStream
from services.api.http.openai.choice_text import ChoiceText, Piece, TextToken
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.request import Asked
from services.api.http.openai.usage import fingerprint, metrics, usage
from services.api.messages import Completion, TextChunk
from services.api.model_card import ModelCard
from speculation.errors import OutriderError
from speculation.types import FinishReason, TokenLogprobs


@dataclass(kw_only=True, slots=True)
class ChoiceRecord:
    """One choice.

    Attributes:
        prompt: which of the inputs it answers.
        text: cuts its chunks into pieces.
        pieces: those of an answer that is not streamed.
        end: its last message.
        scores: log-probabilities of the prompt's tokens but its first, if they are wanted and have come.
        arithmetic: that of its tokens; empty: none has come.
    """

    prompt: int
    text: ChoiceText
    pieces: list[Piece] = field(default_factory=list)
    end: Completion | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    arithmetic: str = ""


class AnswerInProgress(ABC):
    """Turns the events of a request's generations into JSON: what chat and text completions share.

    Args:
        kind: what kind of object it is, as a whole and in each of its events; ``prefix`` begins its id.
        name: what the answer is called, without its prefix.
        created: Unix time in seconds.

    Attributes:
        stream_form: how its events are sent.
    """

    stream_form: ClassVar[type[EventStream]] = EventStream

    def __init__(
        self, asked: Asked, prepared: Prepared, name: str, created: int, *, prefix: str, kind: tuple[str, str]
    ) -> None:
        self.asked = asked
        self.prepared = prepared
        self.records = [self._record(index) for index in range(len(prepared.requests))]
        self._name = f"{prefix}-{name}"
        self._created = created
        self._kind, self._event_kind = kind

    def _record(self, index: int) -> ChoiceRecord:
        stops = bool(self.prepared.requests[index].sampling.stop)
        text = ChoiceText(self.asked.stream_interval if self.asked.stream else None, stops=stops)
        return ChoiceRecord(prompt=index // self.asked.n, text=text)

    @property
    def fingerprint(self) -> str:
        """Names what chose its tokens, as far as it is known. Choices of several versions of the model name each of them."""
        known = dict.fromkeys(record.arithmetic for record in self.records if record.arithmetic)
        named = [fingerprint(replace(self.card, arithmetic=each)) for each in known] or [fingerprint(self.card)]
        return "+".join(named)

    @property
    def card(self) -> ModelCard:
        """The model that answers."""
        return self.prepared.card

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the request that have no effect."""
        return self.prepared.ignored

    @property
    def thought_tokens(self) -> int | None:
        """Tokens of all choices' thoughts so far; None: no thoughts are told from the answer."""
        return None

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """The stream's events before any text."""

    @abstractmethod
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        """The stream's events that tell of a choice's event."""

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The answer that is not streamed, once all choices have ended."""

    async def failed(self, error: OutriderError) -> list[dict[str, Any]]:
        """The last events of a stream that ends with an error; none: the error itself is told, as its API has it."""
        return []

    def pieces_of(self, index: int, event: TextChunk | Completion) -> list[Piece]:
        """The pieces that an event completes."""
        record = self.records[index]
        record.arithmetic = event.arithmetic or record.arithmetic
        if isinstance(event, TextChunk):
            record.scores = record.scores or event.prompt_logprobs
            return record.text.push(event) if self.asked.answers else []
        record.end = event
        if not self.asked.answers:
            return []
        stop = event.stop if isinstance(event.stop, str) else None
        return record.text.finish(stop, include_stop=self.asked.include_stop)

    def take(self, index: int, event: TextChunk | Completion) -> None:
        """Keep an event of an answer that is not streamed."""
        if isinstance(event, TextChunk) and event.restarted:
            self.records[index] = self._record(index)
        self.records[index].pieces += self.pieces_of(index, event)

    def answer_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The answer with its choices, all of which have ended."""
        return self._ended(self._kind, choices)

    def closing(self) -> dict[str, Any]:
        """The event with the usage of all choices."""
        return self._ended(self._event_kind, [])

    def event(self, choice: dict[str, Any]) -> dict[str, Any]:
        """An event that tells of a choice."""
        event = {**self._head(self._event_kind), "choices": [choice]}
        stream = self.asked.stream
        if stream is not None and stream.continuous_usage_stats:
            event["usage"] = self._counts(whole=False)
        elif stream is not None and stream.include_usage:
            event["usage"] = None
        return event

    def _ended(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        told = metrics([record.end for record in self.records if record.end is not None], self.asked.report)
        return {**self._head(kind), "choices": choices, "usage": self._counts(whole=True), "metrics": told}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {
            "id": self._name,
            "object": kind,
            "created": self._created,
            "model": self.card.name,
            "system_fingerprint": self.fingerprint,
        }
        return {**head, "service_tier": "default"} if self.asked.tier else head

    def end_of(self, index: int) -> dict[str, Any]:
        """What a choice's end adds to it: why it ended, and its seed."""
        end = self.records[index].end
        assert end is not None
        reason, stop = (end.finish_reason, end.stop) if self.asked.answers else (FinishReason.LENGTH, None)
        return {"finish_reason": reason.value, "stop_reason": stop, "seed": end.seed}

    def _counts(self, *, whole: bool) -> Any:
        # With details once all choices have ended.
        ended = [record.end for record in self.records if record.end is not None] if whole else []
        prompt = sum(len(ids) for ids in self.prepared.prompts)
        completion = sum(
            record.end.completion_tokens if record.end is not None else record.text.tokens for record in self.records
        )
        if not self.asked.answers:
            completion = 0
        return usage(prompt, completion, ended, predicted=bool(self.asked.prediction), thought_tokens=self.thought_tokens)

    def ids_of(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        """``token_ids`` of a choice or event, if they are wanted."""
        return {"token_ids": [token.id for token in tokens]} if self.asked.return_token_ids else {}

    def worth_telling(self, tokens: Sequence[TextToken]) -> bool:
        """Whether tokens that add no text deserve an event."""
        asked = self.asked
        wanted = asked.return_token_ids or asked.top_logprobs is not None or asked.stream_interval or asked.report != "none"
        return bool(tokens) and bool(wanted)
