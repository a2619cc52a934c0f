"""Text completions: the answer as a whole, or in events of the same shape."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from services.api.http.openai.answer_in_progress import AnswerInProgress
from services.api.http.openai.choice_text import TextToken
from services.api.http.openai.logprobs import Speller, completion_logprobs
from services.api.http.openai.origin_fields import origins_of_all
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.prompt_scores import echoed_logprobs, prompt_logprobs
from services.api.http.openai.request import Asked
from services.api.messages import Completion, RouterPort, TextChunk

_KIND = "text_completion"


class CompletionAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``."""

    def __init__(self, asked: Asked, prepared: Prepared, router: RouterPort, name: str, created: int) -> None:
        super().__init__(asked, prepared, name, created, prefix="cmpl", kind=(_KIND, _KIND))
        self._speller = Speller(router, as_ids=asked.tokens_as_ids)
        # Choices whose prompt, with its log-probabilities, is still to be told.
        self._silent = {*range(len(self.records))} if asked.echo and asked.top_logprobs is not None else set()

    @override
    def opening(self) -> list[dict[str, Any]]:
        """The events before any text: what is echoed, and the prompts' token ids."""
        echoes = self.asked.echo and not self._silent
        if not echoes and not self.asked.return_token_ids:
            return []
        events = []
        for index, record in enumerate(self.records):
            text = self.prepared.echoed[record.prompt] if echoes else ""
            events.append(self._event(index, {"text": text, **self._prompt_ids(index)}))
        return events

    @override
    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        pieces = self.pieces_of(index, event)
        if index in self._silent:
            self._silent.remove(index)
            told.append(self._event(index, {"text": self._echoed(index), "logprobs": await self._echoed_logprobs(index)}))
        for piece in pieces:
            if piece.text or self.worth_telling(piece.tokens):
                told.append(self._event(index, await self._said(index, piece.text, piece.tokens)))
        if isinstance(event, Completion):
            told.append(self._event(index, {"text": "", **self.end_of(index)}))
        return told

    @override
    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, record in enumerate(self.records):
            tokens = tuple(token for piece in record.pieces for token in piece.tokens)
            said = await self._said(index, "".join(piece.text for piece in record.pieces), tokens)
            said["text"] = self._echoed(index) + said["text"]
            if self.asked.echo and self.asked.top_logprobs is not None:
                before = await self._echoed_logprobs(index)
                said["logprobs"] = {name: before[name] + listed for name, listed in said["logprobs"].items()}
            choices.append(
                {"index": index, **said, **self.end_of(index), **self._prompt_ids(index), **await self._scores(index)}
            )
        return self.answer_of(choices)

    def _event(self, index: int, said: dict[str, Any]) -> dict[str, Any]:
        return self.event({"index": index, "logprobs": None, "finish_reason": None, **said})

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self.asked.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.prepared.prompts[self.records[index].prompt])}

    def _echoed(self, index: int) -> str:
        return self.prepared.echoed[self.records[index].prompt]

    async def _echoed_logprobs(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        prompt, top = self.prepared.prompts[record.prompt], self.asked.top_logprobs or 0
        # A prompt of tokens is told with the names of special ones.
        named = not isinstance(self.asked.inputs[record.prompt], str)
        return await echoed_logprobs(prompt, record.scores, self._echoed(index), top, self._speller, named=named)

    async def _scores(self, index: int) -> dict[str, Any]:
        top = self.asked.prompt_logprobs
        if top is None:
            return {}
        return {"prompt_logprobs": await prompt_logprobs(self.records[index].scores, top, self._speller)}

    async def _said(self, index: int, text: str, tokens: tuple[TextToken, ...]) -> dict[str, Any]:
        said: dict[str, Any] = {
            "text": text,
            "logprobs": None,
            **self.ids_of(tokens),
            **await origins_of_all(tokens, self.asked.report),
        }
        if self.asked.top_logprobs is not None:
            said["logprobs"] = await completion_logprobs(tokens, self._speller, len(self._echoed(index)))
        return said
