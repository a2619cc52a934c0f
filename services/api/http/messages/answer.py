"""Messages: the answer as a whole, or in events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from services.api.http.event_stream import NamedEvents
from services.api.http.messages.content_blocks import ContentBlocks
from services.api.http.messages.own_names import own_name
from services.api.http.messages.reading import AskedMessage
from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.answer_reader import reader_for
from services.api.http.openai.choice_text import TextToken
from services.api.http.openai.origin_fields import origins_of, origins_of_all
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.request import Asked
from services.api.http.openai.usage import metrics
from services.api.messages import Completion, RouterPort, TextChunk
from services.in_turns import in_turns
from speculation.types import FinishReason


class MessageStream(NamedEvents):
    """A message as server-sent events."""

    @override
    def has_text(self, content: dict[str, Any]) -> bool:
        return bool(content["type"].startswith("content_block"))

    @override
    async def ping(self) -> None:
        await self.events([{"type": "ping"}])


class MessageAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``: there is one choice."""

    stream_form = MessageStream

    def __init__(
        self, message: AskedMessage, asked: Asked, prepared: Prepared, router: RouterPort, name: str, created: int
    ) -> None:
        super().__init__(asked, prepared, name, created, prefix="msg", kind=("message", "message"))
        self._id = f"msg_{name}"
        self._unread = (*message.unread, *(own_name(field, message.paths) for field in prepared.ignored))
        self._reader = reader_for(asked, prepared, 0)
        self._blocks = ContentBlocks()
        # Tokens that no event has told of yet.
        self._untold: list[TextToken] = []

    @property
    @override
    def ignored(self) -> tuple[str, ...]:
        return self._unread

    @override
    def opening(self) -> list[dict[str, Any]]:
        begun = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(None)}
        return [{"type": "message_start", "message": {**begun, **self._prompt_ids()}}]

    @override
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told = self._read(index, event)
        if isinstance(event, Completion):
            ended = {
                "type": "message_delta",
                "delta": self._stopped(event),
                "usage": self._usage(event),
                **self._extras(event),
            }
            told += [ended, {"type": "message_stop"}]
        if told:
            told[0] |= self._told_of(self._untold)
            self._untold.clear()
        return told

    @override
    async def whole(self) -> dict[str, Any]:
        record = self.records[0]
        assert record.end is not None
        tokens = [token for piece in record.pieces for token in piece.tokens]
        async for part in in_turns(record.pieces):
            for piece in part:
                self._blocks.push(self._reader.push(piece))
        self._blocks.push(self._reader.finish(record.end))
        self._blocks.end()
        answer = {**self._head(self._blocks.whole()), **self._stopped(record.end), "usage": self._usage(record.end)}
        told = {**self.ids_of(tokens), **await origins_of_all(tokens, self.asked.report)}
        return {**answer, **self._extras(record.end), **told, **self._prompt_ids()}

    def _read(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for piece in self.pieces_of(index, event):
            self._untold += piece.tokens
            told += self._blocks.push(self._reader.push(piece))
        if isinstance(event, Completion):
            told += self._blocks.push(self._reader.finish(event)) + self._blocks.end()
        return told

    @override
    def _head(self, content: Any) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self.card.name, "content": content}

    def _stopped(self, end: Completion) -> dict[str, Any]:
        reason, sequence = "end_turn", None
        if not self.asked.answers or end.finish_reason is FinishReason.LENGTH:
            most, given = self.asked.sampling.max_tokens, self.prepared.requests[0].sampling.max_tokens
            reason = "max_tokens" if given == most else "model_context_window_exceeded"
        elif self._reader.calls:
            reason = "tool_use"
        elif isinstance(end.stop, str):
            reason, sequence = "stop_sequence", end.stop
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, end: Completion | None) -> dict[str, Any]:
        prompt = len(self.prepared.prompts[0])
        cached = 0 if end is None else min(prompt, end.cached_tokens)
        said = end.completion_tokens if end is not None and self.asked.answers else 0
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": said,
            "output_tokens_details": {"thinking_tokens": self._reader.thought_tokens},
        }

    def _extras(self, end: Completion) -> dict[str, Any]:
        return {"seed": end.seed, "metrics": metrics([end], self.asked.report)}

    def _told_of(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {**self.ids_of(tokens), **origins_of(tokens, self.asked.report)}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prepared.prompts[0])} if self.asked.return_token_ids else {}
