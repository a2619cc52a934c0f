"""What fills a gap, as a whole or in events, as llama-server tells it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from services.api.http.event_stream import EventStream
from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.choice_text import TextToken
from services.api.http.openai.origin_fields import origins_of, origins_of_all
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.request import Asked
from services.api.http.openai.usage import metrics
from services.api.messages import Completion, RouterPort, TextChunk
from speculation.types import FinishReason


class InfillStream(EventStream):
    """An answer that is being streamed; its last event says that it stops."""

    last = b""

    @override
    def has_text(self, content: dict[str, Any]) -> bool:
        return "content" in content


class InfillAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``: there is one choice."""

    stream_form = InfillStream

    def __init__(self, asked: Asked, prepared: Prepared, router: RouterPort, name: str, created: int) -> None:
        super().__init__(asked, prepared, name, created, prefix="infill", kind=("infill", "infill"))

    @override
    def opening(self) -> list[dict[str, Any]]:
        return []

    @override
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told = [
            {"index": 0, "content": piece.text, **self._told_of(piece.tokens), "stop": False}
            for piece in self.pieces_of(index, event)
            if piece.text or self.worth_telling(piece.tokens)
        ]
        return [*told, self._end(event, "")] if isinstance(event, Completion) else told

    @override
    async def whole(self) -> dict[str, Any]:
        record = self.records[0]
        assert record.end is not None
        tokens = [token for piece in record.pieces for token in piece.tokens]
        told = {**self._ids_of(tokens), **await origins_of_all(tokens, self.asked.report)}
        return {**self._end(record.end, "".join(piece.text for piece in record.pieces)), **told}

    def _end(self, end: Completion, text: str) -> dict[str, Any]:
        limited = end.finish_reason is FinishReason.LENGTH or not self.asked.answers
        word = end.stop if isinstance(end.stop, str) and not limited else ""
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "model": self.card.name,
            "tokens_predicted": end.completion_tokens if self.asked.answers else 0,
            "tokens_evaluated": len(end.prompt_token_ids),
            "tokens_cached": end.cached_tokens,
            "truncated": False,
            "stop_type": "limit" if limited else "word" if word else "eos",
            "stopping_word": word,
            "seed": end.seed,
            "metrics": metrics([end], self.asked.report),
        }

    def _told_of(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {**self._ids_of(tokens), **origins_of(tokens, self.asked.report)}

    def _ids_of(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {"tokens": [token.id for token in tokens]} if self.asked.return_token_ids else {}
