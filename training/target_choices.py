"""What the target says at the positions of one batch, from its states; computed once for each position."""

from __future__ import annotations

import torch

# Rows at a time: what is as wide as the vocabulary stays small.
_CHUNK = 128


class TargetChoices:
    """Computed where it is asked for, and kept.

    Args:
        output: [V, h] all of the target's output rows.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self._output = output
        self._norms = torch.empty(0, device=output.device)
        self._best = torch.empty(0, dtype=torch.int64, device=output.device)

    @torch.no_grad()
    def at(self, positions: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each position, the logarithm of the sum of its exponentiated logits, and the likeliest token.

        Args:
            positions: int64 [n], numbers within the batch.
            states: [n, h], the target's at these positions.
        """
        missing = int(positions.max()) + 1 - len(self._best) if len(positions) else 0
        if missing > 0:
            self._norms = torch.cat((self._norms, self._norms.new_zeros(missing)))
            self._best = torch.cat((self._best, self._best.new_full((missing,), -1)))
        new = self._best[positions] < 0
        for rows, wanted in zip(torch.split(states[new], _CHUNK), torch.split(positions[new], _CHUNK), strict=True):
            logits = rows.float() @ self._output.T
            self._norms[wanted] = logits.logsumexp(-1)
            self._best[wanted] = logits.argmax(-1)
        return self._norms[positions], self._best[positions]
