"""What each path of Anthropic's API does."""

from __future__ import annotations

from functools import partial

from services.api.http.call import HttpCall
from services.api.http.endpoints import EndpointsBeside
from services.api.http.messages.answer import MessageAnswer
from services.api.http.messages.reading import AskedMessage, fitted, read_count, read_message


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
            tokens = await self._endpoints.tokens_of(call, message.asked)
        await call.answer({"input_tokens": tokens})

    async def _fitted(self, message: AskedMessage) -> AskedMessage:
        return fitted(message, (await self._router.models())[0], strict=self._strict)
