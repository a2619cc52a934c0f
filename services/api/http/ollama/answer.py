"""What a model says, as a whole or in lines of JSON, as Ollama tells it."""

from __future__ import annotations

import json
import random
import string
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

from services.api.http.event_stream import EventStream
from services.api.http.ollama.reading import AskedOllama, own_name
from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.answer_reader import Delta, reader_for
from services.api.http.openai.choice_text import Piece
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.request import Asked
from services.api.http.openai.usage import metrics
from services.api.messages import Completion, RouterPort, TextChunk
from services.in_turns import in_turns
from speculation.types import FinishReason

_FIELD = ',"obfuscation":""'
_LETTERS = string.ascii_letters + string.digits
_SECOND = 1_000_000_000


class OllamaStream(EventStream):
    """An answer of one JSON object a line."""

    last = b""
    content_type = "application/x-ndjson"

    @override
    def has_text(self, content: dict[str, Any]) -> bool:
        return "message" in content or "response" in content

    @override
    def framed(self, content: bytes, padding: int | None, name: str) -> bytes:
        if padding is None:
            return content + b"\n"
        missing = -(len(content) + len(_FIELD) + 1) % padding
        filler = "".join(random.choices(_LETTERS, k=missing))
        return content[:-1] + f',"obfuscation":"{filler}"}}\n'.encode()

    @override
    async def ping(self) -> None:
        """There are no comments between lines."""


class OllamaAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``: there is one choice.

    Args:
        chats: what is said is a message; otherwise it is a text.
    """

    stream_form = OllamaStream

    def __init__(
        self,
        request: AskedOllama,
        asked: Asked,
        prepared: Prepared,
        router: RouterPort,
        name: str,
        created: int,
        *,
        chats: bool,
    ) -> None:
        super().__init__(asked, prepared, name, created, prefix="ollama", kind=("ollama", "ollama"))
        self._model, self._unread, self._chats = request.model or self.card.name, request.unread, chats
        # A completion has neither thoughts nor calls.
        self._reader = None if isinstance(asked.inputs[0], str) else reader_for(asked, prepared, 0)
        self._calls: dict[int, tuple[Delta, list[str]]] = {}

    @property
    @override
    def ignored(self) -> tuple[str, ...]:
        return (*self._unread, *map(own_name, self.prepared.ignored))

    @override
    def opening(self) -> list[dict[str, Any]]:
        return []

    @override
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told = [line for piece in self.pieces_of(index, event) for line in self._lines(self._deltas(piece))]
        if isinstance(event, Completion):
            told += self._lines(self._rest(event))
            if calls := self._whole_calls():
                told.append(self._line("", "", calls))
            told.append({**self._line("", "", []), **self._end(event)})
        return told

    @override
    async def whole(self) -> dict[str, Any]:
        record = self.records[0]
        assert record.end is not None
        deltas: list[Delta] = []
        async for part in in_turns(record.pieces):
            deltas += [delta for piece in part for delta in self._deltas(piece)]
        deltas += self._rest(record.end)
        thought = "".join(each.text for each in deltas if each.thought)
        text = "".join(each.text for each in deltas if each.call is None and not each.thought)
        for each in deltas:
            self._gather(each)
        return {**self._line(text, thought, self._whole_calls()), **self._end(record.end)}

    def _deltas(self, piece: Piece) -> list[Delta]:
        if self._reader is not None:
            return self._reader.push(piece)
        return [Delta(text=piece.text)] if piece.text else []

    def _rest(self, end: Completion) -> list[Delta]:
        return self._reader.finish(end) if self._reader is not None else []

    def _lines(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """Text and thoughts as they come; calls are told whole."""
        for delta in deltas:
            self._gather(delta)
        return [
            self._line("", delta.text, []) if delta.thought else self._line(delta.text, "", [])
            for delta in deltas
            if delta.call is None and delta.text
        ]

    def _gather(self, delta: Delta) -> None:
        if delta.call is not None:
            self._calls.setdefault(delta.call, (delta, []))[1].append(delta.text)

    def _whole_calls(self) -> list[dict[str, Any]]:
        """The calls whose arguments are an object; one that was cut short has none."""
        calls = []
        for begun, parts in self._calls.values():
            try:
                arguments = json.loads("".join(parts) or "{}")
            except ValueError:
                continue
            if isinstance(arguments, dict):
                calls.append({"id": begun.id, "function": {"name": begun.name, "arguments": arguments}})
        return calls

    def _line(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        said: dict[str, Any]
        if self._chats:
            called = {"tool_calls": calls} if calls else {}
            said = {"message": {"role": "assistant", "content": text, **thinking, **called}}
        else:
            said = {"response": text, **thinking}
        return {"model": self._model, "created_at": now(), **said, "done": False}

    def _end(self, end: Completion) -> dict[str, Any]:
        timing = end.timing
        first = max(0.0, timing.time_to_first_token_s - timing.queue_s)
        return {
            "done": True,
            "done_reason": "length" if end.finish_reason is FinishReason.LENGTH else "stop",
            "total_duration": round(timing.total_s * _SECOND),
            "load_duration": 0,
            "prompt_eval_count": len(end.prompt_token_ids),
            "prompt_eval_duration": round(first * _SECOND),
            "eval_count": end.completion_tokens,
            "eval_duration": round(max(0.0, timing.total_s - timing.time_to_first_token_s) * _SECOND),
            "metrics": metrics([end], self.asked.report),
        }


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
