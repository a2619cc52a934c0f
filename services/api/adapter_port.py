"""What users with the scope ``admin`` may do with LoRA adapters."""

from __future__ import annotations

from typing import Protocol


class AdapterPort(Protocol):
    """Changes which adapters there are. A part of ``services.api.messages.RouterPort``."""

    async def load_adapter(self, name: str, folder: str) -> None:
        """Let requests name a LoRA adapter as their model.

        Args:
            folder: where it lies at the verifiers.

        Raises:
            OutriderError: it cannot be served, or not by all verifiers; then none has it.
        """

    async def unload_adapter(self, name: str) -> None:
        """Drop a LoRA adapter, once the answers under way with it have ended.

        Raises:
            OutriderError: there is none of the name, or it is in use for too long; then it is served as before.
        """
