"""What stand-ins for a router have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from services.api.messages import ClientRequest, Completion, TextChunk, TokenSpelling
from services.api.model_card import ModelCard
from speculation.messages import ServiceState
from speculation.reloads import PauseMode, RunningAnswers


class RouterStub:
    """Implements ``RouterPort``: can do nothing. Who stands in overrides what is asked of it."""

    def generate(self, request: ClientRequest) -> AsyncGenerator[TextChunk | Completion, None]:
        raise NotImplementedError

    async def models(self, tenant: str | None = None) -> list[ModelCard]:
        raise NotImplementedError

    async def forget(self, tenant: str) -> None:
        raise NotImplementedError

    async def tokenize(self, request: ClientRequest) -> tuple[int, ...]:
        raise NotImplementedError

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    async def spell(self, token_ids: Sequence[int]) -> tuple[TokenSpelling, ...]:
        raise NotImplementedError

    async def tokenizer_info(self) -> Mapping[str, Any]:
        raise NotImplementedError

    async def ready(self) -> bool:
        raise NotImplementedError

    async def service_state(self) -> ServiceState:
        raise NotImplementedError

    async def reload(self, folder: str, running: RunningAnswers, within_s: float) -> tuple[str, ...]:
        raise NotImplementedError

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def paused(self) -> bool:
        raise NotImplementedError

    async def load_adapter(self, name: str, folder: str) -> None:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError
