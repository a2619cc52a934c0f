"""What continues a text or fills a gap, as a whole or in events, as llama-server tells it."""

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


class LlamaStream(EventStream):
    """An answer that is being streamed; its last event says that it stops."""

    last = b""

    @override
    def has_text(self, content: dict[str, Any]) -> bool:
        return "content" in content


class LlamaAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``: there is one choice.

    Args:
        fields: of the answer's end, those that are told; None: all.
    """

    stream_form = LlamaStream

    def __init__(
        self,
        asked: Asked,
        prepared: Prepared,
        router: RouterPort,
        name: str,
        created: int,
        *,
        fields: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(asked, prepared, name, created, prefix="llama", kind=("completion", "completion"))
        self._fields = fields

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
        return [*told, self._chosen(self._end(event, ""))] if isinstance(event, Completion) else told

    @override
    async def whole(self) -> dict[str, Any]:
        record = self.records[0]
        assert record.end is not None
        tokens = [token for piece in record.pieces for token in piece.tokens]
        told = {**self._ids_of(tokens), **await origins_of_all(tokens, self.asked.report)}
        return self._chosen({**self._end(record.end, "".join(piece.text for piece in record.pieces)), **told})

    def _chosen(self, told: dict[str, Any]) -> dict[str, Any]:
        """The fields that are wanted, as far as there are; those within others by their whole names."""
        if self._fields is None:
            return told
        found = {}
        for name in self._fields:
            value: Any = told
            for part in name.split("/"):
                if not isinstance(value, dict):
                    value = None
                    break
                value = value.get(part)
            if value is not None:
                found[name] = value
        return found

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
            "timings": _timings(end, end.completion_tokens if self.asked.answers else 0),
            "metrics": metrics([end], self.asked.report),
        }

    def _told_of(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {**self._ids_of(tokens), **origins_of(tokens, self.asked.report)}

    def _ids_of(self, tokens: Sequence[TextToken]) -> dict[str, Any]:
        return {"tokens": [token.id for token in tokens]} if self.asked.return_token_ids else {}


def _timings(end: Completion, predicted: int) -> dict[str, float]:
    """Counts and times by llama-server's names."""
    told: dict[str, float] = {"cache_n": end.cached_tokens}
    begun = end.timing.time_to_first_token_s
    for name, count, seconds in (
        ("prompt", len(end.prompt_token_ids) - end.cached_tokens, begun - end.timing.queue_s),
        ("predicted", predicted, end.timing.total_s - begun),
    ):
        told |= {f"{name}_n": count, f"{name}_ms": (taken := max(0.0, seconds * 1000))}
        told[f"{name}_per_token_ms"] = taken / count if count else 0.0
        told[f"{name}_per_second"] = 1000 * count / taken if taken else 0.0
    return {**told, "draft_n": end.stats.num_draft_tokens, "draft_n_accepted": end.stats.num_accepted_draft_tokens}
