"""Rows of logits as a request's processors leave them: penalised, barred, divided by its temperature, truncated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.verifier.choosing.barring import bar_rows
from services.verifier.choosing.penalties import Changes
from services.verifier.choosing.picks import truncated
from services.verifier.choosing.reading import LogitsReader
from services.verifier.choosing.walks import ChoicePoint
from services.verifier.model.target_port import PackedBits
from services.verifier.model.to_device import to_device
from speculation.choose import choose

_COPIED_ROWS = 16


class PreparedRows:
    """Prepares rows of logits, whichever points they are for.

    Args:
        reader: says where logits lie.
    """

    def __init__(self, reader: LogitsReader) -> None:
        self._reader = reader
        # Rows are copied here before they are changed. Allocating this anew for every level would cost more than all else.
        self._copy = torch.empty(0, 0, dtype=torch.float32)

    def of(self, logits: torch.Tensor, points: Sequence[ChoicePoint]) -> torch.Tensor:
        """[points, vocabulary], penalised, barred and divided by the temperature; valid until the next call."""
        vocabulary = logits.shape[1]
        if len(self._copy) < len(points) or self._copy.shape[1] != vocabulary or self._copy.device != logits.device:
            self._copy = torch.empty(max(len(points), _COPIED_ROWS), vocabulary, dtype=torch.float32, device=logits.device)
        prepared = self._copy[: len(points)]
        if self._reader.on_host(logits):
            # numpy copies, since waking torch's threads costs more than they save here.
            own = logits.numpy()
            for copy, point in zip(prepared.numpy(), points, strict=True):
                copy[:] = own[point.row]
        else:
            rows = to_device([point.row for point in points], logits.device)
            torch.index_select(logits, 0, rows, out=prepared)
        changes = Changes([], [], [], [])
        for at, point in enumerate(points):
            point.request.penalties.changes(at, vocabulary, point.path, point.position, changes)
        changes.apply(prepared, self._reader)
        bar_rows(prepared, [_allowed(point) for point in points], self._reader)
        temperatures = [point.request.params.temperature or 1.0 for point in points]
        if self._reader.on_host(logits):
            for copy, temperature in zip(prepared.numpy(), temperatures, strict=True):
                copy /= np.float32(temperature)
        else:
            prepared /= to_device(temperatures, logits.device, torch.float32)[:, None]
        return prepared

    def processed(self, point: ChoicePoint, logits: torch.Tensor) -> torch.Tensor:
        """[vocabulary], on the CPU: the logits after all processors of the request."""
        request = point.request
        if request.pipeline is not None:
            return request.pipeline(logits[point.row].cpu(), [*request.history, *point.path], _allowed(point))
        return truncated(self.of(logits, [point])[0], request)

    def distribution(self, point: ChoicePoint, logits: torch.Tensor) -> NDArray[np.float64]:
        """[vocabulary], how likely each token is at a point."""
        row, params = self.processed(point, logits), point.request.params
        if params.temperature == 0:
            p = np.zeros(len(row))
            p[choose(row, params, params.seed, point.position)] = 1.0
            return p
        return np.asarray(torch.softmax(row.double(), dim=-1).numpy())


def _allowed(point: ChoicePoint) -> PackedBits | None:
    """What the request's rule allows at a point; None: everything."""
    return None if point.request.rule is None else point.request.rule.allowed(point.path)
