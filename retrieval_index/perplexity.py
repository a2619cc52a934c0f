"""The target's perplexity on each document, in batches (SPECTRA, section 3.2).

The same passes give the target's likeliest successors of every scored token, from which the successor table is built.
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
    """The score of one document.

    Attributes:
        nll: mean negative log-likelihood, in nats per token.
        tokens: how many tokens were scored.
        likely: [tokens, 1 + k]; a row holds a token id and the k likeliest ids after it, likeliest first.
    """

    nll: float
    tokens: int
    likely: NDArray[np.uint32]

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite for a document that is too short to be scored."""
        return math.exp(min(self.nll, 700.0)) if self.tokens else math.inf

    @staticmethod
    def joined(parts: Sequence[Score]) -> Score:
        """The score of a document that was read in parts."""
        if len(parts) == 1:
            return parts[0]
        tokens = sum(part.tokens for part in parts)
        nll = sum(part.nll * part.tokens for part in parts) / max(1, tokens)
        return Score(nll=nll, tokens=tokens, likely=np.concatenate([part.likely for part in parts]))


class Scorer(Protocol):
    """The model, as far as building an index needs it."""

    def score(self, documents: Sequence[Sequence[int]]) -> list[Score]:
        """Score documents, given as token ids; each fits into the context."""
        ...

    def states(self, documents: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
        """For each document what the output layer reads at every token: [tokens, hidden size]."""
        ...


class ModelScorer:
    """Implements ``Scorer`` with a transformers model in float32.

    Args:
        top_k: successors to keep for each token.

    Raises:
        ConfigurationError: the model cannot be loaded.
    """

    def __init__(self, model_path: Path, *, device: str = "cpu", top_k: int = 8) -> None:
        import transformers

        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            self._model = model.eval().to(device)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(
                f"cannot be loaded on {device} ({error})", field="--model", verb="", value=model_path
            ) from error
        self._device = device
        self._top_k = top_k

    def score(self, documents: Sequence[Sequence[int]]) -> list[Score]:
        ids, mask = _padded(documents)
        with torch.inference_mode():
            output = self._model(ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False)
            # One document at a time: log-probabilities of the whole batch would take several copies of the logits.
            return [self._of_one(output.logits[row, : len(d)], ids[row, : len(d)]) for row, d in enumerate(documents)]

    def states(self, documents: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
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
    """Token ids and attention mask, both [documents, longest]."""
    longest = max(len(document) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask = torch.zeros(len(documents), longest, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document, dtype=torch.long)
        mask[row, : len(document)] = 1
    return ids, mask
