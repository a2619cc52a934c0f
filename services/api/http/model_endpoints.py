"""What is answered about the model beside generation, and what llama-server's /completion and /infill do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from services.api.http.call import HttpCall
from services.api.http.endpoints import EndpointsBeside
from services.api.http.llama_server.answer import LlamaAnswer
from services.api.http.llama_server.request import Chosen, continue_names, infill_names, read_continue, read_infill
from services.api.http.openai.chat_request import read_chat
from services.api.http.openai.preparing import Prepared, fitted, named, own_names, prepare
from services.api.http.openai.request import Asked
from speculation.errors import InvalidArgument


class ModelEndpoints(EndpointsBeside):
    """Answers calls that other servers' clients know."""

    async def infill(self, call: HttpCall) -> None:
        """POST /infill"""
        await self._answer(call, read_infill, infill_names, "Infill")

    async def continue_text(self, call: HttpCall) -> None:
        """POST /completion"""
        await self._answer(call, read_continue, continue_names, "Continue")

    async def _answer(
        self,
        call: HttpCall,
        read: Callable[[dict[str, Any]], tuple[Asked, Chosen]],
        naming: Callable[[], AbstractContextManager[None]],
        method: str,
    ) -> None:
        asked, fields = await self._endpoints.read(call, read)
        with naming():
            await call.unless_gone(self._endpoints.generate(call, asked, partial(LlamaAnswer, fields=fields), method))

    async def render(self, call: HttpCall) -> None:
        """POST /v1/chat/completions/render: what would be asked of the model, as vLLM tells it."""
        asked = await self._endpoints.read(call, read_chat)
        base = call.base_request(asked.request_id)
        card, fits, ignored = await fitted(asked, self._router, self._endpoints.aside(call), strict=self._strict)
        try:
            prepared = await call.unless_gone(prepare(fits, card, self._router, base, ignored))
        except InvalidArgument as error:
            raise named(error, own_names(fits)) from error
        await call.answer(_rendered(call.request_id, asked, prepared))

    async def tokenizer_info(self, call: HttpCall) -> None:
        """GET /tokenizer_info: the tokenizer's settings, as in its file."""
        await call.answer(dict(await self._router.tokenizer_info()))


def _rendered(request_id: str, asked: Asked, prepared: Prepared) -> dict[str, Any]:
    first = prepared.requests[0]
    given = first.sampling.given
    if first.sampling.structured_outputs is not None:
        form = first.sampling.structured_outputs
        given["structured_outputs"] = {"kind": form.kind, "text": form.text}
    return {
        "request_id": request_id,
        "token_ids": list(prepared.prompts[0]),
        "features": None,
        "sampling_params": {**given, "n": asked.n, "skip_special_tokens": asked.skip_special_tokens},
        "model": prepared.card.name,
        "stream": asked.stream is not None,
        "cache_salt": asked.cache_salt or None,
        "priority": asked.priority,
    }
