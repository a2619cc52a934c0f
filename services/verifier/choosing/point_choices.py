"""The choice at each of several points: by compiled kernels, by batched functions, or by the law itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from services.verifier.choosing.picks import argmax, by_law, sample, unchanged
from services.verifier.choosing.prepared_rows import PreparedRows
from services.verifier.choosing.reading import LogitsReader
from services.verifier.choosing.walks import ChoicePoint, TokenOrError
from services.verifier.kernels.native.choice_kernel import UNDECIDED, ChoiceKernel
from services.verifier.kernels.native.library import Library
from services.verifier.model.target_port import NOT_CHOSEN


class PointChoices:
    """Chooses at points, whichever walks they are of.

    Args:
        kernels: compiled kernels, which choose first where the logits are on a CPU.
        prepared: prepares the rows that are chosen from.
        reader: says where logits lie.
    """

    def __init__(self, kernels: Library | None, prepared: PreparedRows, reader: LogitsReader) -> None:
        self._kernel = None if kernels is None else ChoiceKernel(kernels)
        self._prepared, self._reader = prepared, reader

    def at(
        self, logits: torch.Tensor, points: Sequence[ChoicePoint], likeliest: Callable[[], list[int]] | None = None
    ) -> list[TokenOrError]:
        """The choice at each point, or the error of that point; an error does not affect other requests."""
        try:
            return self._choose(logits, points, likeliest)
        except Exception as error:
            if len(points) == 1:
                return [error]
            return [choice for point in points for choice in self.at(logits, [point], likeliest)]

    def _choose(
        self, logits: torch.Tensor, points: Sequence[ChoicePoint], likeliest: Callable[[], list[int]] | None
    ) -> list[TokenOrError]:
        choices: list[TokenOrError] = [NOT_CHOSEN] * len(points)
        plain: list[int] = []
        changed: list[int] = []
        for at, point in enumerate(points):
            request = point.request
            if request.pipeline is not None:
                choices[at] = by_law(point, self._prepared.processed, point, logits)
            elif request.params.temperature > 0 or request.rule is not None or request.penalties.needed(point.position):
                changed.append(at)
            else:
                plain.append(at)
        if plain:
            own = [points[at] for at in plain]
            for at, choice in zip(plain, unchanged(logits, own, likeliest, self._reader), strict=True):
                choices[at] = choice
        if changed and self._kernel is not None and self._reader.on_host(logits):
            free = [at for at in changed if points[at].request.rule is None]
            for at, token in zip(free, self._kernel.choose(logits, [points[at] for at in free]), strict=True):
                choices[at] = token
            changed = [at for at in changed if choices[at] == UNDECIDED or points[at].request.rule is not None]
        sampled = [at for at in changed if points[at].request.params.temperature > 0]
        greedy = [at for at in changed if points[at].request.params.temperature == 0]
        for group, choose_all in ((greedy, argmax), (sampled, sample)):
            if group:
                own = [points[at] for at in group]
                for at, choice in zip(group, choose_all(self._prepared.of(logits, own), own, self._reader), strict=True):
                    choices[at] = choice
        return choices
