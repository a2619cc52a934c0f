"""Labels between 0 and 1 for DISCO's classifier: how likely a token drawn from the draft model's q is accepted.

Under speculative sampling that is sum min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023, corollary 3.6), which DSpark trains
its confidence on. A hard label is one draw of it, so at a temperature above 0 soft labels say the same with less noise. At
temperature 0 p is certain, and both are the same.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.drafter.draft_model.source import DraftModelSource

# Positions at a time: what is as wide as the vocabulary stays small.
_CHUNK = 64


def acceptance_chances(
    p_logits: torch.Tensor, q_logits: torch.Tensor, ids: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """sum min(p, q) of softmax(logits / T), for each row.

    Args:
        p_logits: [n, V] the target's, float32.
        q_logits: [n, kept ids] the draft model's.
        ids: int64 [kept ids], the target's id of each; None: the same ids.
        temperature: above 0.

    Returns:
        [n], float32, 0 to 1.
    """
    p, q = (p_logits / temperature).softmax(-1), (q_logits / temperature).softmax(-1)
    return torch.minimum(p if ids is None else p[:, ids], q).sum(-1)


class SoftLabels:
    """Labels along the target's own text.

    Args:
        source: a draft model with the target's tokeniser.
        output: [V, h], all of the target's output rows, on the CPU.
        temperature: above 0.
    """

    def __init__(self, source: DraftModelSource, output: torch.Tensor, temperature: float) -> None:
        self._source = source
        self._output = output
        self._temperature = temperature

    @torch.inference_mode()
    def along(self, prompt: tuple[int, ...], answer: tuple[int, ...], states: NDArray[np.float16]) -> NDArray[np.float32]:
        """The label of a token drafted at each place of the answer, behind the target's own text.

        Args:
            states: [answer, h], the states from which the target chose these tokens.

        Returns:
            [answer], float32.
        """
        text = (*prompt, *answer)
        q_logits = self._source.logits_behind(text[:-1], len(answer))
        targets = self._source.targets
        ids = None if targets is None else torch.from_numpy(targets)
        found = [
            acceptance_chances(part.float() @ self._output.T, q_logits[at : at + _CHUNK], ids, self._temperature)
            for at in range(0, len(answer), _CHUNK)
            for part in [torch.from_numpy(states[at : at + _CHUNK])]
        ]
        return np.asarray(torch.cat(found).numpy(), dtype=np.float32)
