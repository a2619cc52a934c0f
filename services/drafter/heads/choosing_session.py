"""One request's session in a drafter of hidden states: its text, and how the target chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.heads.draft_vocabulary import DraftVocabulary
from speculation.messages import OpenSession, StepReport
from speculation.philox import NoiseStream, gumbel


class ChoosingSession:
    """Implements ``SourceSession``.

    Args:
        extra: what it may draft beside the model's own vocabulary: tokens of its prompt.

    Attributes:
        tokens: all committed tokens.
        temperature: of the target's choices.
        noise: the noise of the target's choices, if it may be known.
        sampled: whether drafts are drawn from q.
        drafted: what its source keeps of the draft for the present text.
    """

    def __init__(self, message: OpenSession, extra: DraftVocabulary | None) -> None:
        self.tokens = list(message.tokens)
        self.extra = extra
        self.temperature = message.temperature
        self.noise = message.noise
        self.sampled = message.sampled and message.temperature > 0
        self.drafted: Any = None
        self._gumbels: dict[int, torch.Tensor] = {}

    def observe(self, report: StepReport) -> None:
        self.tokens += report.committed
        self.drafted = None
        for position in [position for position in self._gumbels if position < len(self.tokens)]:
            del self._gumbels[position]

    def close(self) -> None:
        self.tokens.clear()
        self.extra = self.noise = self.drafted = None
        self._gumbels.clear()

    def gumbel(self, position: int, ids: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """[ids], the noise with which the target chooses its token for ``position``."""
        assert self.noise is not None
        found = self._gumbels.get(position)
        if found is None:
            made = gumbel(self.noise.seed, NoiseStream.CHOICE, position, ids)
            found = self._gumbels[position] = torch.from_numpy(made).to(device, torch.float32)
        return found
