"""A router that hands everything on to another one. Subclasses that count or trace requests override what they observe."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from services.api.messages import ClientRequest, Completion, RouterPort, TextChunk, TokenSpelling
from services.api.model_card import ModelCard
from speculation.messages import ServiceState
from speculation.reloads import PauseMode, RunningAnswers


class PassingRouter:
    """Implements ``services.api.messages.RouterPort`` by another router."""

    def __init__(self, router: RouterPort) -> None:
        self._router = router

    def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        return self._router.generate(request)

    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        return await self._router.models(tenant)

    async def forget(self, tenant: str) -> None:
        await self._router.forget(tenant)

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._router.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        await self._router.unload_adapter(name)

    async def reload(self, folder: str, running: RunningAnswers, within_s: float) -> tuple[str, ...]:
        return await self._router.reload(folder, running, within_s)

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        await self._router.pause(mode, within_s)

    async def resume(self) -> None:
        await self._router.resume()

    async def paused(self) -> bool:
        return await self._router.paused()

    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        return await self._router.tokenize(request)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._router.detokenize(token_ids)

    async def spell(self, token_ids: Sequence[int]) -> tuple[TokenSpelling, ...]:
        return await self._router.spell(token_ids)

    async def tokenizer_info(self) -> Mapping[str, Any]:
        return await self._router.tokenizer_info()

    async def ready(self) -> bool:
        return await self._router.ready()

    async def service_state(self) -> ServiceState:
        return await self._router.service_state()
