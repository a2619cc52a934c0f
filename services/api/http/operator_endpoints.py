"""What operators ask, as vLLM's and SGLang's APIs have it: new weights, pauses of decoding, adapters."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from services.api.http.call import HttpCall
from services.api.http.declared import Declared, read_declared
from services.api.http.endpoints import EndpointsBeside
from services.api.http.openai.errors import Refused
from services.api.http.openai.preparing import named
from services.api.http.openai.protocol.operator_bodies import (
    LoadAdapterBody,
    PauseBody,
    PauseGenerationBody,
    ReloadBody,
    ResumeBody,
    UnloadAdapterBody,
)
from services.api.http.openai.usage import fingerprint
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.reloads import PauseMode

_Body = TypeVar("_Body", bound=Declared)


class TrainerEndpoints(EndpointsBeside):
    """Answers calls of those who change weights, such as trainers."""

    async def reload(self, call: HttpCall) -> None:
        """POST /update_weights_from_disk: it goes on, whether or not its client stays."""
        asked = await self._endpoints.read(call, partial(read_declared, ReloadBody))
        within_s = limits.RELOAD_S if asked.within_s is None else asked.within_s
        try:
            notes = await call.unless_gone(self._router.reload(asked.model_path, asked.running or "finish", within_s))
        except InvalidArgument as error:
            raise named(error, {"folder": "model_path"}) from error
        told = {"success": True, "message": f"the weights in {asked.model_path} are served", "num_paused_requests": 0}
        named_as = fingerprint((await self._router.models())[0])
        await call.answer({**told, "system_fingerprint": named_as, "notes": list(notes)})

    async def pause(self, call: HttpCall) -> None:
        """POST /pause"""
        asked = await self._read(call, PauseBody)
        await self._pause(call, asked.mode or "wait", limits.RELOAD_S if asked.within_s is None else asked.within_s)

    async def pause_generation(self, call: HttpCall) -> None:
        """POST /pause_generation"""
        asked = await self._read(call, PauseGenerationBody)
        await self._pause(call, "wait" if asked.mode is None else "keep", limits.RELOAD_S)

    async def resume(self, call: HttpCall) -> None:
        """POST /resume, /continue_generation"""
        await self._read(call, ResumeBody)
        await self._router.resume()
        await call.answer({"status": "resumed"})

    async def is_paused(self, call: HttpCall) -> None:
        """GET /is_paused"""
        await call.answer({"is_paused": await self._router.paused()})

    async def _pause(self, call: HttpCall, mode: PauseMode, within_s: float) -> None:
        await call.unless_gone(self._router.pause(mode, within_s))
        await call.answer({"status": "paused"})

    async def _read(self, call: HttpCall, kind: type[_Body]) -> _Body:
        """The fields of the query, where vLLM's clients have them, and of the body, which theirs lack.

        Raises:
            OutriderError: a field is wrong, or stands in both; or the body cannot be read.
        """
        asked = {name: _value(text) for name, text in call.query if text and name in kind.model_fields}
        if _is_bare(call):
            return read_declared(kind, asked)

        def merged(body: dict[str, object]) -> _Body:
            if twice := sorted(asked.keys() & body.keys()):
                raise Refused(twice[0], str(body[twice[0]]), "set once, in the body or in the query")
            return read_declared(kind, {**asked, **body})

        return await self._endpoints.read(call, merged)


def _is_bare(call: HttpCall) -> bool:
    """Whether there is no body. A page in a browser can send that unasked, too, but its ``origin`` comes along."""
    headers = call.headers
    unsent = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return unsent and "content-type" not in headers and "origin" not in headers


def _value(text: str) -> object:
    """A value of the query: true or false, which Python's clients write as True and False, a number, or a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


class AdapterEndpoints(EndpointsBeside):
    """Answers calls that change which adapters there are."""

    async def load(self, call: HttpCall) -> None:
        """POST /v1/load_lora_adapter"""
        asked = await self._endpoints.read(call, partial(read_declared, LoadAdapterBody))
        await call.unless_gone(self._router.load_adapter(asked.lora_name, asked.lora_path))
        await call.answer({"id": asked.lora_name, "object": "model", "deleted": False})

    async def unload(self, call: HttpCall) -> None:
        """POST /v1/unload_lora_adapter"""
        asked = await self._endpoints.read(call, partial(read_declared, UnloadAdapterBody))
        await call.unless_gone(self._router.unload_adapter(asked.lora_name))
        await call.answer({"id": asked.lora_name, "object": "model", "deleted": True})
