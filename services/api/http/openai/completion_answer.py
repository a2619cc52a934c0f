"""Text completions: the answer as a whole, or in events of the same shape."""

from __future__ import annotations

from typing import Any

from services.api.http.openai.choice_record import AnswerInProgress
from services.api.http.openai.choice_text import TextToken
from services.api.http.openai.generation import Prepared
from services.api.http.openai.logprobs import Speller, completion_logprobs
from services.api.http.openai.origin_fields import origins_of
from services.api.http.openai.request import Asked
from services.api.messages import Completion, RouterPort, TextChunk

_KIND = "text_completion"


class CompletionAnswer(AnswerInProgress):
    """Implements ``AnswerInProgress``."""

    def __init__(self, asked: Asked, prepared: Prepared, router: RouterPort, name: str, created: int) -> None:
        super().__init__(asked, prepared, name, created, prefix="cmpl", kind=(_KIND, _KIND))
        self._speller = Speller(router, as_ids=asked.tokens_as_ids)

    def opening(self) -> list[dict[str, Any]]:
        """The events before any text: what is echoed, and the prompts' token ids."""
        if not self.asked.echo and not self.asked.return_token_ids:
            return []
        events = []
        for index, record in enumerate(self.records):
            text = self.prepared.echoed[record.prompt]
            events.append(self._event(index, {"text": text, **self._prompt_ids(index)}))
        return events

    async def add(self, index: int, event: TextChunk | Completion) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for piece in self.pieces_of(index, event):
            if piece.text or self.worth_telling(piece.tokens):
                told.append(self._event(index, await self._said(piece.text, piece.tokens)))
        if isinstance(event, Completion):
            told.append(self._event(index, {"text": "", **self.end_of(index)}))
        return told

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, record in enumerate(self.records):
            tokens = tuple(token for piece in record.pieces for token in piece.tokens)
            text = self.prepared.echoed[record.prompt] + "".join(piece.text for piece in record.pieces)
            said = await self._said(text, tokens)
            choices.append({"index": index, **said, **self.end_of(index), **self._prompt_ids(index)})
        return self.answer_of(choices)

    def _event(self, index: int, said: dict[str, Any]) -> dict[str, Any]:
        return self.event({"index": index, "logprobs": None, "finish_reason": None, **said})

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self.asked.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.prepared.prompts[self.records[index].prompt])}

    async def _said(self, text: str, tokens: tuple[TextToken, ...]) -> dict[str, Any]:
        said: dict[str, Any] = {
            "text": text,
            "logprobs": None,
            **self.ids_of(tokens),
            **origins_of(tokens, self.asked.report),
        }
        if self.asked.top_logprobs is not None:
            await self._speller.learn(tokens)
            said["logprobs"] = completion_logprobs(tokens, self._speller)
        return said
