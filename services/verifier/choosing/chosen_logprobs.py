"""Log-probabilities of a pass's chosen tokens, of all requests that ask for them at once, and of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.verifier.choosing.device_choice import rows_at_once
from services.verifier.choosing.walks import Walk
from services.verifier.model.target_port import NOT_CHOSEN
from services.verifier.model.to_device import to_device
from speculation.choose import log_probabilities, ranked
from speculation.types import TokenLogprobs


class ChosenLogprobs:
    """Computed where the logits are, when the first is asked for; then one copy brings them to the host.

    Args:
        logits: [rows, vocabulary], float32, unprocessed, on any device.
    """

    def __init__(self, walks: Sequence[Walk], logits: torch.Tensor) -> None:
        self._walks, self._logits = walks, logits
        self._found: dict[tuple[int, int], TokenLogprobs] | None = None

    def of(self, walk: Walk, row: int, token: int) -> TokenLogprobs:
        """As ``log_probabilities`` of the logits after ``row`` of ``walk``."""
        if self._found is None:
            self._found = self._of_choices()
        place, top = walk.first_row + row, walk.request.params.logprobs or 0
        found = self._found.get((place, token))
        return log_probabilities(self._logits[place], token, top) if found is None else found

    def scored(self, walk: Walk) -> tuple[TokenLogprobs, ...]:
        """As ``log_probabilities`` of the prompt's tokens that are scored."""
        tokens, top = walk.rows.scored, walk.request.params.prompt_logprobs or 0
        begin = walk.first_row - len(tokens)
        chosen = [(begin + row, token) for row, token in enumerate(tokens)]
        # A few rows at a time: a long prompt's take as much memory as a pass's logits.
        some = rows_at_once(self._logits.shape[1])
        parts = (chosen[start : start + some] for start in range(0, len(chosen), some))
        return tuple(each for part in parts for each in _some(self._logits, part, top))

    def _of_choices(self) -> dict[tuple[int, int], TokenLogprobs]:
        """By row of the logits and chosen token."""
        found: dict[tuple[int, int], TokenLogprobs] = {}
        for top in {walk.request.params.logprobs for walk in self._walks} - {None}:
            chosen = [
                (walk.first_row + row, token)
                for walk in self._walks
                if walk.request.params.logprobs == top
                for row, token in enumerate(walk.choices)
                if token != NOT_CHOSEN
            ]
            if chosen:
                found.update(zip(chosen, _some(self._logits, chosen, top or 0), strict=True))
        return found


def _some(logits: torch.Tensor, chosen: Sequence[tuple[int, int]], top: int) -> list[TokenLogprobs]:
    """Those of (row, token) pairs."""
    rows, tokens = to_device(chosen, logits.device).unbind(1)
    logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
    values, ids = ranked(logprobs, top)
    own = logprobs.gather(1, tokens[:, None])
    # Doubles hold ids and float32 exactly.
    numbers = torch.cat([own.double(), values.double(), ids.double()], dim=1).tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=made[0],
            top_ids=tuple(int(each) for each in made[1 + top :]),
            top_logprobs=tuple(made[1 : 1 + top]),
        )
        for (_, token), made in zip(chosen, numbers, strict=True)
    ]
