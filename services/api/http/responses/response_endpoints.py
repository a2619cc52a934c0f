"""What each path of the Responses API does."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from services.access.gate import Gate
from services.api.config import HttpConfig
from services.api.http.call import HttpCall
from services.api.http.endpoints import Endpoints
from services.api.http.openai.errors import HttpError, Refused
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.request import Asked
from services.api.http.responses.chat_body import AskedResponse, NewResponse, ask, fitted, read_create
from services.api.http.responses.conversation import Item
from services.api.http.responses.input_items import input_items, read_page
from services.api.http.responses.output_items import owner_of
from services.api.http.responses.response_answer import ResponseAnswer, ResponseCancelled
from services.api.http.responses.response_object import DeletedResponse, InputTokens
from services.api.http.responses.stored_responses import ResponseStore, StoredResponse
from services.api.http.written_json import write
from services.api.messages import RouterPort
from speculation import limits
from speculation.errors import InvalidArgument, Unavailable

_Made = TypeVar("_Made")
# Bytes beyond which JSON is read in a thread, so that it does not delay other requests.
_LARGE = 64 << 10
_ID_BYTES = 24


class ResponseEndpoints:
    """Answers calls of the Responses API.

    Args:
        endpoints: those of OpenAI's older API, which generate.
        store: keeps answers.
    """

    def __init__(self, endpoints: Endpoints, store: ResponseStore, gate: Gate, config: HttpConfig) -> None:
        self._endpoints = endpoints
        self._store = store
        self._gate = gate
        self._config = config
        # Answers in progress, by tenant and id.
        self._running: dict[tuple[str, str], ResponseAnswer] = {}

    async def create(self, call: HttpCall) -> None:
        """POST /v1/responses"""
        new = await self._endpoints.read(call, _read)
        tenant, known = call.known_caller.tenant, False
        with self._gate.recorded(call.known_caller, "Responses", call.request_id, unless=lambda: known):
            self._gate.require(call.known_caller, "generate")
            wanted = await self._wanted(tenant, new)
            stores = self._stores(wanted)
            known = True
        name = f"resp_{secrets.token_hex(_ID_BYTES)}"

        def form(asked: Asked, prepared: Prepared, router: RouterPort, request_id: str, created: int) -> ResponseAnswer:
            keep = partial(self._ended, tenant, name, wanted.context if stores else None)
            answer = ResponseAnswer(
                wanted, prepared, router, request_id, created, response_id=name, stores=stores, keep=keep
            )
            self._running[tenant, name] = answer
            return answer

        try:
            await call.unless_gone(self._endpoints.generate(call, wanted.asked, form, "Responses"))
        except InvalidArgument as error:
            raise wanted.names.told(error) from error
        finally:
            self._running.pop((tenant, name), None)

    async def count(self, call: HttpCall) -> None:
        """POST /v1/responses/input_tokens: of the conversation as it is sent to the model."""
        new = await self._endpoints.read(call, _read)
        wanted = await self._wanted(call.known_caller.tenant, new)
        try:
            tokens = await self._endpoints.tokens_of(call, wanted.asked)
        except InvalidArgument as error:
            raise wanted.names.told(error) from error
        await call.answer(InputTokens(input_tokens=tokens).model_dump())

    async def retrieve(self, call: HttpCall) -> None:
        """GET /v1/responses/{id}"""
        if (answer := self._running.get((call.known_caller.tenant, call.path_id))) is not None:
            await call.answer(await answer.response("in_progress"))
            return
        stored = await self._stored(call)
        await call.answer_bytes(stored.response, [("content-type", "application/json")])

    async def delete(self, call: HttpCall) -> None:
        """DELETE /v1/responses/{id}"""
        if not await self._store.delete(call.known_caller.tenant, call.path_id):
            raise _unknown(call.path_id)
        await call.answer(DeletedResponse(id=call.path_id).model_dump())

    async def cancel(self, call: HttpCall) -> None:
        """POST /v1/responses/{id}/cancel. It is not counted as a request, so that a key can end its own at its limit."""
        with self._gate.recorded(call.known_caller, "CancelResponse", call.request_id):
            self._gate.require(call.known_caller, "generate")
            answer = self._running.get((call.known_caller.tenant, call.path_id))
            status = json.loads((await self._stored(call)).response)["status"] if answer is None else answer.ended
            if answer is None or status is not None:
                raise HttpError(400, "response_has_ended", f"the response is {status}: must be in progress")
            if (running := self._endpoints.running.get(answer)) is not None:
                running.fail(ResponseCancelled("the response was cancelled"))
            await call.answer(await answer.response("cancelled"))

    async def input_items(self, call: HttpCall) -> None:
        """GET /v1/responses/{id}/input_items"""
        page = read_page(dict(call.query))
        stored = await self._stored(call)
        listed = await _threaded(len(stored.context), lambda: input_items(call.path_id, json.loads(stored.context), page))
        await call.answer(listed.model_dump())

    async def _stored(self, call: HttpCall) -> StoredResponse:
        stored = await self._store.get(call.known_caller.tenant, call.path_id)
        if stored is None:
            raise _unknown(call.path_id)
        return stored

    def _stores(self, wanted: AskedResponse) -> bool:
        """Whether the answer is stored.

        Raises:
            Refused: it is to be, and cannot.
        """
        private = self._config.public.privacy.padding(wanted.asked.private) is not None
        possible = not private and self._config.responses.most > 0
        if wanted.body.store and not possible:
            why = "private answers are not stored" if private else "this server stores none (server.stored_responses)"
            raise Refused("store", True, f"false, or unset: {why}", "unsupported_value")
        return possible and wanted.body.store is not False

    async def _wanted(self, tenant: str, new: NewResponse | AskedResponse) -> AskedResponse:
        """What a body asks for, as the model's chat template takes it.

        Raises:
            InvalidArgument: as ``_asked``.
        """
        wanted = await self._asked(tenant, new) if isinstance(new, NewResponse) else new
        return fitted(wanted, await self._endpoints.card(None))

    async def _asked(self, tenant: str, new: NewResponse) -> AskedResponse:
        """What a body asks for that builds on stored responses.

        Raises:
            InvalidArgument: as ``ask``, or there is no such response.
        """
        previous = new.body.previous_response_id
        stored = None if previous is None else await self._store.get(tenant, previous)
        if previous is not None and stored is None:
            allowed = "the id of a response that is stored for this API key"
            raise Refused("previous_response_id", previous or "empty", allowed, "previous_response_not_found")
        items = await self._referenced(tenant, new.references)
        return await asyncio.to_thread(lambda: ask(new, [] if stored is None else _items_of(stored), items.get))

    async def _referenced(self, tenant: str, names: tuple[str, ...]) -> dict[str, Item]:
        """The stored items of these ids, as far as there are.

        Raises:
            Refused: the responses that they belong to are too large together.
        """
        found: dict[str, Item] = {}
        size = 0
        for owner in dict.fromkeys(map(owner_of, names)):
            stored = await self._store.get(tenant, owner)
            if stored is None:
                continue
            size += len(stored.response)
            if size > limits.MAX_PUBLIC_MESSAGE_BYTES:
                most = limits.MAX_PUBLIC_MESSAGE_BYTES >> 20
                raise Refused("input", "set", f"without references to items of responses of more than {most} MiB together")
            response = await _threaded(len(stored.response), partial(json.loads, stored.response))
            found |= {item["id"]: item for item in response["output"]}
        return found

    async def _ended(self, tenant: str, name: str, context: bytes | None, response: dict[str, Any]) -> None:
        """Store a response before its client knows of its end, and tell it if that cannot be.

        Args:
            context: the items that it answered; None: it is not to be stored.
        """
        if context is not None:
            written = await write(response)
            try:
                response["store"] = await self._store.put(tenant, name, StoredResponse(response=written, context=context))
            except Unavailable:
                response["store"] = False
        self._running.pop((tenant, name), None)


def _read(content: dict[str, Any]) -> NewResponse | AskedResponse:
    """A body, or what it asks for if that needs nothing stored."""
    new = read_create(content)
    return new if new.needs_stored else ask(new, [], lambda _: None)


def _items_of(stored: StoredResponse) -> list[Item]:
    """The conversation up to a response's end."""
    return [*json.loads(stored.context), *json.loads(stored.response)["output"]]


async def _threaded(size: int, make: Callable[[], _Made]) -> _Made:
    """What ``make`` makes of so many bytes."""
    return await asyncio.to_thread(make) if size > _LARGE else make()


def _unknown(name: str) -> HttpError:
    shown = name if name.isascii() and name.isprintable() and 0 < len(name) <= 80 else "this id"
    return HttpError(404, "response_not_found", f"there is no response {shown} that is stored for this API key")
