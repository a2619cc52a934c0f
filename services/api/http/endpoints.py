"""What each path does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.api.http.answering import Answering
from services.api.http.call import HttpCall
from services.api.http.live_status import LatelyKnownState, status_of
from services.api.http.openai.chat_answer import ChatAnswer
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.completion_answer import CompletionAnswer
from services.api.http.openai.completion_request import read_completion
from services.api.http.openai.model_fit import called
from services.api.http.openai.token_requests import read_detokenize, read_tokenize
from services.api.http.openai.usage import server_version
from services.api.http.page import page
from services.api.messages import ModelCard, RouterPort, TokenSpelling
from services.api.readiness import LatelyReady, Well
from speculation.errors import NotFound, Unavailable

_OWNER = "outrider"


class Endpoints:
    """Answers calls from a router.

    Args:
        answering: answers those that generate.
    """

    def __init__(self, router: RouterPort, answering: Answering) -> None:
        self._router = router
        self._answering = answering
        self._well = Well(router)
        self._started = int(time.time())
        self._ready = LatelyReady(self._well.ready)
        self._state = LatelyKnownState(router)

    async def chat(self, call: HttpCall) -> None:
        """POST /v1/chat/completions"""
        asked = await self._answering.read(call, read_chat)
        await self._answering.answer(call, asked, ChatAnswer, "ChatCompletions")

    async def completions(self, call: HttpCall) -> None:
        """POST /v1/completions"""
        asked = await self._answering.read(call, read_completion)
        await self._answering.answer(call, asked, CompletionAnswer, "Completions")

    async def stop(self) -> None:
        """End what goes on beside requests."""
        await self._well.stop()

    async def models(self, call: HttpCall) -> None:
        """GET /v1/models"""
        await call.answer({"object": "list", "data": [self._model(card) for card in await self._cards()]})

    async def model(self, call: HttpCall) -> None:
        """GET /v1/models/{id}"""
        cards = {card.name: card for card in await self._cards()}
        if call.path not in cards:
            raise NotFound("model", call.path or "empty", ", ".join(cards))
        await call.answer(self._model(cards[call.path]))

    async def _cards(self) -> list[ModelCard]:
        """The models, one for each of their names."""
        return [replace(card, name=name) for card in await self._router.models() for name in (card.name, *card.aliases)]

    def _model(self, card: ModelCard) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._started,
            "owned_by": _OWNER,
            "root": card.name,
            "parent": None,
            "max_model_len": card.max_model_len,
            "strategies": list(card.strategies),
            "default_strategy": card.default_strategy,
            "bit_exact": card.bit_exact,
        }

    async def tokenize(self, call: HttpCall) -> None:
        """POST /tokenize: of a text, or of a conversation as it is sent to the model."""
        model, request, names = await self._answering.read(call, read_tokenize)
        card = await self._card(model)
        request = replace(request, tenant=call.known_caller.tenant)
        ids = await call.unless_gone(self._router.tokenize(request))
        found: dict[str, Any] = {"count": len(ids), "max_model_len": card.max_model_len, "tokens": list(ids)}
        spelt = await asyncio.to_thread(_names_of, await self._router.spell(ids)) if names else None
        await call.answer({**found, "token_strs": spelt}, large=True)

    async def detokenize(self, call: HttpCall) -> None:
        """POST /detokenize"""
        model, ids = await self._answering.read(call, read_detokenize)
        await self._card(model)
        await call.answer({"prompt": await call.unless_gone(self._router.detokenize(ids))})

    async def _card(self, model: str | None) -> ModelCard:
        return called((await self._router.models())[0], model)

    async def status(self, call: HttpCall) -> None:
        """GET /v1/outrider/status: the load, and what all requests add up to where the key may see that."""
        await call.answer(status_of(await self._state(), whole="observe" in call.known_caller.scopes))

    async def page(self, call: HttpCall) -> None:
        """GET /: the page for browsers."""
        await call.answer_bytes(*page())

    async def health(self, call: HttpCall) -> None:
        """GET /health: this process answers."""
        await call.answer({"status": "ok"})

    async def ready(self, call: HttpCall) -> None:
        """GET /ready: a request would be answered."""
        if not await self._ready():
            raise Unavailable("no verifier answers; try again")
        await call.answer({"status": "ok"})

    async def version(self, call: HttpCall) -> None:
        """GET /version"""
        await call.answer({"version": server_version()})


def _names_of(tokens: Sequence[TokenSpelling]) -> list[str]:
    return [token.data.decode(errors="replace") for token in tokens]
