"""How well the target itself could have written a document: its perplexity, in batches (SPECTRA, section 3.2).

The same passes show the target's likeliest next tokens after every token of the corpus; they are kept for the snapshot that
recycling begins with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from speculation.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Of one document: mean negative log-likelihood in nats per token, over ``tokens`` tokens.

    ``likely``: [tokens scored, 1 + k], each scored token's predecessor and what was likeliest after it.
    """

    nll: float
    tokens: int
    likely: NDArray[np.uint32]

    @property
    def perplexity(self) -> float:
        """exp(nll); documents too short to be scored are infinitely surprising."""
        return math.exp(min(self.nll, 700.0)) if self.tokens else math.inf


class Scorer(Protocol):
    """Scores documents; what ``build`` needs of a model."""

    def score(self, documents: Sequence[Sequence[int]]) -> list[Score]:
        """Score documents, given as token ids, each long enough to fit."""
        ...

    def states(self, documents: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
        """Of each document what the output layer reads at every token: [tokens, hidden size]."""
        ...


class ModelScorer:
    """Scores with a transformers model.

    Args:
        top_k: likeliest successors that are kept for each token.

    Raises:
        ConfigurationError: the model cannot be loaded.
    """

    def __init__(self, model_path: Path, *, device: str = "cpu", top_k: int = 8) -> None:
        import transformers

        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            self._model = model.eval().to(device)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(f"--model {model_path}: cannot be loaded on {device} ({error})") from error
        self._device = device
        self._top_k = top_k

    def score(self, documents: Sequence[Sequence[int]]) -> list[Score]:
        """See ``Scorer``."""
        ids, mask = _padded(documents)
        with torch.inference_mode():
            output = self._model(ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False)
            # A document at a time: all log-probabilities at once would be several copies of the logits.
            return [self._of_one(output.logits[row, : len(d)], ids[row, : len(d)]) for row, d in enumerate(documents)]

    def states(self, documents: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
        """See ``Scorer``."""
        ids, mask = _padded(documents)
        with torch.inference_mode():
            decoder = self._model.get_decoder()
            made = decoder(ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False).last_hidden_state
        return [made[row, : len(d)].to("cpu", torch.float16).numpy() for row, d in enumerate(documents)]

    def _of_one(self, logits: torch.Tensor, ids: torch.Tensor) -> Score:
        scored = len(ids) - 1
        if scored < 1:
            return Score(nll=0.0, tokens=0, likely=np.zeros((0, 1 + self._top_k), dtype=np.uint32))
        said = logits[:-1].float()
        losses = torch.nn.functional.cross_entropy(said, ids[1:].to(said.device), reduction="mean")
        top = torch.topk(said, self._top_k, dim=-1).indices.cpu()
        likely = torch.cat([ids[:-1, None], top], dim=1).numpy().astype(np.uint32)
        return Score(nll=float(losses), tokens=scored, likely=likely)


def _padded(documents: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and their mask: [documents, longest]."""
    longest = max(len(document) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask = torch.zeros(len(documents), longest, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document, dtype=torch.long)
        mask[row, : len(document)] = 1
    return ids, mask
