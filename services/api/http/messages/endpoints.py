"""What each path of Anthropic's API does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.api.http.call import HttpCall
from services.api.http.endpoints import EndpointsBeside
from services.api.http.messages.answer import MessageAnswer
from services.api.http.messages.reading import AskedMessage, fitted, read_count, read_message
from services.api.http.openai import preparing


class MessageEndpoints(EndpointsBeside):
    """Answers calls of Anthropic's API."""

    async def message(self, call: HttpCall) -> None:
        """POST /v1/messages"""
        asked = await self._endpoints.read(call, read_message)
        with asked.naming():
            message = await self._fitted(asked)
        with message.naming():
            form = partial(MessageAnswer, message)
            await call.unless_gone(self._endpoints.generate(call, message.asked, form, "Messages"))

    async def count(self, call: HttpCall) -> None:
        """POST /v1/messages/count_tokens: of the conversation as it is sent to the model."""
        asked = await self._endpoints.read(call, read_count)
        with asked.naming():
            message = await self._fitted(asked)
        with message.naming():
            _, fits, _ = await preparing.fitted(
                message.asked, self._router, self._endpoints.aside(call), strict=self._strict
            )
            request = replace(call.base_request(None), input=fits.inputs[0], chat=fits.chat)
            ids = await call.unless_gone(self._router.tokenize(request))
        await call.answer({"input_tokens": len(ids)})

    async def _fitted(self, message: AskedMessage) -> AskedMessage:
        return fitted(message, (await self._router.models())[0], strict=self._strict)
