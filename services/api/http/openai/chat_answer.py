"""Chat completions: the answer as a whole, or in events."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from typing_extensions import override

from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.answer_reader import Delta, reader_for
from services.api.http.openai.choice_text import Piece
from services.api.http.openai.logprobs import Speller, chat_logprobs
from services.api.http.openai.origin_fields import origins_of, origins_of_all
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.prompt_scores import prompt_logprobs
from services.api.http.openai.request import Asked
from services.api.messages import Completion, RouterPort, TextChunk
from services.in_turns import in_turns


class ChatAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``."""

    def __init__(self, asked: Asked, prepared: Prepared, router: RouterPort, name: str, created: int) -> None:
        kind = ("chat.completion", "chat.completion.chunk")
        super().__init__(asked, prepared, name, created, prefix="chatcmpl", kind=kind)
        self._speller = Speller(router, as_ids=asked.tokens_as_ids)
        self._readers = [reader_for(asked, prepared, index) for index in range(len(prepared.requests))]

    @property
    @override
    def thought_tokens(self) -> int | None:
        if not self.card.thoughts:
            return None
        return sum(reader.thought_tokens for reader in self._readers)

    @override
    def opening(self) -> list[dict[str, Any]]:
        """The events before any text: one for each choice says who speaks."""
        events = [self._event(index, {"role": "assistant", "content": ""}, None) for index in range(len(self.records))]
        if self.asked.return_token_ids:
            events[0]["prompt_token_ids"] = list(self.prepared.prompts[0])
        return events

    @override
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        reader = self._readers[index]
        for piece in self.pieces_of(index, event):
            told += await self._tell(index, piece, reader.push(piece))
        if isinstance(event, Completion):
            told += await self._tell(index, Piece(text="", tokens=()), reader.finish(event))
            told.append(self._event(index, {}, None, end=self._end(index)))
        return told

    async def _tell(self, index: int, piece: Piece, deltas: list[Delta]) -> list[dict[str, Any]]:
        """The events of a piece; its tokens belong to the first one."""
        if not deltas and not self.worth_telling(piece.tokens):
            return []
        logprobs = None
        if self.asked.top_logprobs is not None:
            logprobs = await chat_logprobs(piece.tokens, self._speller)
        first, *others = deltas or [Delta()]
        event = self._event(index, first.as_json(), logprobs)
        event["choices"][0] |= {**self.ids_of(piece.tokens), **origins_of(piece.tokens, self.asked.report)}
        return [event, *(self._event(index, delta.as_json(), None) for delta in others)]

    def _event(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, end: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, **(end or {})}
        return self.event(choice)

    def _end(self, index: int) -> dict[str, Any]:
        end = self.end_of(index)
        called = self._readers[index].calls > 0 and end["finish_reason"] == "stop"
        return {**end, "finish_reason": "tool_calls"} if called else end

    @override
    async def whole(self) -> dict[str, Any]:
        answer = self.answer_of([await self._choice(index) for index in range(len(self.records))])
        if self.asked.return_token_ids:
            answer["prompt_token_ids"] = list(self.prepared.prompts[0])
        if (top := self.asked.prompt_logprobs) is not None:
            answer["prompt_logprobs"] = await prompt_logprobs(self.records[0].scores, top, self._speller)
        return answer

    async def _choice(self, index: int) -> dict[str, Any]:
        pieces, reader = self.records[index].pieces, self._readers[index]
        tokens = [token for piece in pieces for token in piece.tokens]
        end = self.records[index].end
        assert end is not None
        deltas: list[Delta] = []
        async for part in in_turns(pieces):
            deltas += [delta for piece in part for delta in reader.push(piece)]
        deltas += reader.finish(end)
        logprobs = None
        if self.asked.top_logprobs is not None:
            logprobs = await chat_logprobs(tokens, self._speller)
        return {
            "index": index,
            "message": _message(deltas),
            "logprobs": logprobs,
            **self._end(index),
            **self.ids_of(tokens),
            **await origins_of_all(tokens, self.asked.report),
        }


def _message(deltas: list[Delta]) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas if delta.call is None and not delta.thought)
    thought = "".join(delta.text for delta in deltas if delta.thought)
    begun: dict[int, Delta] = {}
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for delta in deltas:
        if delta.call is not None:
            begun.setdefault(delta.call, delta)
            arguments[delta.call].append(delta.text)
    calls = [
        {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": "".join(arguments[call])}}
        for call, each in begun.items()
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thought:
        message |= {"content": content or None, "reasoning_content": thought}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    return message
