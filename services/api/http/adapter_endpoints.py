"""Loads and unloads LoRA adapters, as vLLM's API has it."""

from __future__ import annotations

from functools import partial

from services.api.http.call import HttpCall
from services.api.http.declared import read_declared
from services.api.http.endpoints import EndpointsBeside
from services.api.http.openai.protocol.adapter_bodies import LoadAdapterBody, UnloadAdapterBody


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
