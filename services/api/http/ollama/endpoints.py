"""What each path of Ollama's API does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from services.api.http.call import HttpCall
from services.api.http.declared import read_declared
from services.api.http.endpoints import EndpointsBeside
from services.api.http.ollama.answer import OllamaAnswer, now
from services.api.http.ollama.protocol import ShowBody
from services.api.http.ollama.reading import AskedOllama, fitted, known_name, naming, read_chat_body, read_generate_body
from services.api.http.openai.usage import server_version
from services.api.model_card import ModelCard


class OllamaEndpoints(EndpointsBeside):
    """Answers calls of Ollama's API."""

    async def chat(self, call: HttpCall) -> None:
        """POST /api/chat"""
        await self._answer(call, read_chat_body, "OllamaChat", chats=True)

    async def generate(self, call: HttpCall) -> None:
        """POST /api/generate"""
        await self._answer(call, read_generate_body, "OllamaGenerate", chats=False)

    async def _answer(
        self, call: HttpCall, read: Callable[[dict[str, Any]], AskedOllama], method: str, *, chats: bool
    ) -> None:
        request = await self._endpoints.read(call, read)
        served = await self._endpoints.card(None)
        model = known_name(request.model, served)
        if request.asked is None:
            with self._endpoints.counted(call, "OllamaLoad"):
                card = await self._endpoints.card(model)
                said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
                ended = {"done": True, "done_reason": "load"}
                await call.answer({"model": request.model or card.name, "created_at": now(), **said, **ended})
            return
        request = fitted(replace(request, asked=replace(request.asked, model=model)), served, strict=self._strict)
        assert request.asked is not None
        with naming():
            form = partial(OllamaAnswer, request, chats=chats)
            await call.unless_gone(self._endpoints.generate(call, request.asked, form, method))

    async def tags(self, call: HttpCall) -> None:
        """GET /api/tags: the served models; /api/ps tells the same, for all of them are loaded."""
        told = await self._endpoints.listed(call)
        await call.answer({"models": [_tagged(name, model["created_at"]) for name, model in told.items()]})

    async def show(self, call: HttpCall) -> None:
        """POST /api/show"""
        asked = await self._endpoints.read(call, lambda body: read_declared(ShowBody, body))
        card = await self._endpoints.card(known_name(asked.model or asked.name, await self._endpoints.card(None)))
        told = (await self._endpoints.listed(call))[card.name]
        await call.answer(
            {
                "details": _DETAILS,
                "model_info": {
                    "general.architecture": _UNKNOWN,
                    f"{_UNKNOWN}.context_length": card.max_model_len,
                    f"{_UNKNOWN}.vocab_size": card.vocab_size,
                },
                "capabilities": list(_abilities(card)),
                "modified_at": told["created_at"],
            }
        )

    async def version(self, call: HttpCall) -> None:
        """GET /api/version: Outrider's."""
        await call.answer({"version": server_version()})


_UNKNOWN = "outrider"
_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": _UNKNOWN,
    "families": [_UNKNOWN],
    "parameter_size": "",
    "quantization_level": "",
}


def _tagged(name: str, written: str) -> dict[str, Any]:
    return {"name": name, "model": name, "modified_at": written, "size": 0, "digest": "", "details": _DETAILS}


def _abilities(card: ModelCard) -> list[str]:
    has = {"completion": True, "tools": card.chats, "insert": card.infills, "thinking": bool(card.thoughts)}
    return [name for name, there in has.items() if there]
