"""A target of a single process: there is nobody to tell, and tokens enter the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.verifier.choosing.sought import WHOLE_ROWS, Sought
from services.verifier.model.target_port import Rows
from services.verifier.stages.activations import Activations
from services.verifier.stages.settling import Decide
from services.verifier.stages.split_weights import R, Read

if TYPE_CHECKING:
    from services.verifier.model.slice import ModelSlice


class NoStages:
    """Implements ``EarlierStages``."""

    files = ""

    def claim(self, device: torch.device) -> None: ...

    def settle(self, own: str, decide: Decide) -> str:
        return decide([own])

    def keep_settled(self, decision: str) -> None: ...

    def join(self, part: ModelSlice) -> None: ...

    def open(self, request_id: str, shared: int, blocks: Sequence[int]) -> None: ...

    def grow(self, request_id: str, blocks: Sequence[int]) -> None: ...

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None: ...

    def load_state(self, request_id: str, length: int, kept: int) -> None: ...

    def save_state(self, request_id: str, length: int, kept: int) -> None: ...

    def close(self, request_id: str) -> None: ...

    def load_adapter(self, name: str, folder: str, digest: str) -> None: ...

    def drop_adapter(self, name: str) -> None: ...

    def adapt(self, request_id: str, name: str) -> None: ...

    def draft_by(self, folder: str, digest: str) -> None: ...

    def load_weights(self, folder: Path, own: Callable[[str], R]) -> R:
        return own(self.files)

    def exchange(self, weights: Read, part: ModelSlice) -> None: ...

    def begin(self, batch: Sequence[Rows], sought: Sought = WHOLE_ROWS) -> None: ...

    def finish(self, part: ModelSlice) -> Activations:
        return Activations()

    def beat(self, part: ModelSlice) -> None: ...

    def stop(self) -> None: ...
