"""What users with the scope ``admin`` may do with weights: replace those that are served, pause decoding, load adapters."""

from __future__ import annotations

from typing import Protocol

from speculation.reloads import PauseMode, RunningAnswers


class WeightsPort(Protocol):
    """Changes by which weights tokens are chosen. A part of ``services.api.messages.RouterPort``."""

    async def reload(self, folder: str, running: RunningAnswers, within_s: float) -> tuple[str, ...]:
        """Replace the weights that are served, at all verifiers together. Returns notes for whoever does.

        Args:
            folder, running, within_s: as in ``speculation.reloads.ReloadOrder``.

        Raises:
            OutriderError: nothing that is served has changed; says why.
        """

    async def pause(self, mode: PauseMode, within_s: float) -> None:
        """Let no verifier decode until ``resume``. New requests wait in the queue.

        Args:
            mode: ``wait``: answers under way end first; ``keep``: they stop between two tokens.
            within_s: seconds within which they must have ended.

        Raises:
            OutriderError: decoding goes on; says why.
        """

    async def resume(self) -> None:
        """Let all verifiers decode; no error where they do.

        Raises:
            Unavailable: not all have confirmed it.
        """

    async def paused(self) -> bool:
        """Whether no verifier decodes.

        Raises:
            Unavailable: not all answer.
        """

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
