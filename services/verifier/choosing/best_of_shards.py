"""The likeliest ids of rows whose logits lie with several ranks, and the tokens drawn: each finds its own part's best.

A whole row has hundreds of thousands of bytes, a rank's few best some hundred, and only these travel. What is found is what
one process finds in whole rows: the greatest logits, of equals the lowest ids, or the greatest sum of logit and noise, which
is a function of the id. Top-k leaves ids among the likeliest, so whoever draws by it needs no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn

from services.verifier.choosing.device_parts import DevicePartFinder, over_ranks
from services.verifier.choosing.greatest import Finder
from services.verifier.choosing.sought import WHOLE_ROWS, Draw, Sought
from services.verifier.kernels.native.choice_kernel import UNDECIDED
from services.verifier.kernels.native.draw_kernel import DrawKernel, DrawnRow, leads
from services.verifier.kernels.native.library import Library
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from services.verifier.kernels.sharded_layers import ShardedOutput
from services.verifier.model.target_port import NOT_CHOSEN, Rows
from services.verifier.stages.stage_ranks import StageRanks

# Of each row read, its likeliest ids, likeliest first.
LikeliestIds = Sequence[tuple[int, ...]]
# A logit, negative so that the greatest come first, and its id.
_Pair = tuple[float, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundInParts:
    """What ranks find of the rows that a pass reads.

    Attributes:
        ids: the likeliest, as many as were sought; ``logits`` are theirs.
        drawn: the token drawn after each row of which all ids may be; ``NOT_CHOSEN`` after others.
        vocabulary: of all ranks.
    """

    ids: LikeliestIds
    logits: Sequence[tuple[float, ...]]
    drawn: Sequence[int]
    vocabulary: int

    def whole(self, read: Sequence[int]) -> torch.Tensor:
        """[rows of the pass, vocabulary]: those ``read`` have their likeliest logits, and -inf where top-k leaves no id."""
        made = torch.full((len(self.ids), self.vocabulary), -math.inf, dtype=torch.float32)
        rows = made.numpy()
        for row in read:
            rows[row, self.ids[row]] = self.logits[row]
        return made


class FindsInPart(Protocol):
    """What a rank finds in its part of a pass's rows, and tells the others."""

    def told(self, own: torch.Tensor, k: int, draws: Sequence[DrawnRow], first: int) -> torch.Tensor:
        """Of each row ``k`` logits, greatest first, and their places in ``own``; of each draw what ``DrawKernel.best`` says.

        Doubles hold all exactly, so that one gather carries them: [2 * rows * k + 3 * draws], where ``own`` lies. Logits of
        all rows are -inf where they do not suffice.

        Args:
            own: [rows read, part of the vocabulary], float32.
            first: the part's first id.
        """
        ...


class PartFinder:
    """Implements ``FindsInPart`` by native kernels."""

    def __init__(self, library: Library) -> None:
        self.likeliest, self.draws = LikeliestKernel(library), DrawKernel(library)

    def told(self, own: torch.Tensor, k: int, draws: Sequence[DrawnRow], first: int) -> torch.Tensor:
        numbers = _likeliest_told(own, k, self.likeliest) + self.draws.best(own, draws, first)
        return torch.tensor(numbers, dtype=torch.float64)


class BestOfRanks:
    """Lets a pass's rows be gathered whole, or only their best. All ranks of a stage do the same.

    Args:
        captured: passes may be graphs, which hold this rank's part of the logits alone: what is gathered is so behind them.

    Attributes:
        found: of the last pass's rows; None: they are whole.
    """

    def __init__(self, output: ShardedOutput, finder: FindsInPart, *, captured: bool = False) -> None:
        self._output, self._finder, self._captured = output, finder, captured
        self.found: FoundInParts | None = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the context the output layer gives this rank's part."""
        self._output.whole = False
        try:
            yield
        finally:
            self._output.whole = True

    def finds(self, find: Finder | None) -> Finder | None:
        """Finds the likeliest of all ranks' parts, by ``find`` in each: within a graph as well."""
        return None if find is None else over_ranks(find, self._output.shards)

    def rows_of(
        self,
        run: Callable[[], torch.Tensor],
        batch: Sequence[Rows] = (),
        sought: Sought = WHOLE_ROWS,
        likeliest: Callable[[], Callable[[], list[int]] | None] = lambda: None,
    ) -> torch.Tensor:
        """What ``run`` makes by the output layer: whole rows, or this rank's part where ``found`` says what is sought.

        Args:
            likeliest: after the run, gives what gives the likeliest id of each row by ``finds``; None: nothing does.

        Raises:
            TargetLost: another rank is gone.
        """
        self.found, shards = None, self._output.shards
        wanted = 0 < sought.ids <= self._output.out_features // shards.count
        if not wanted and not self._captured:
            return run()
        with self.apart():
            own = run().float()
        if wanted and sought.ids == 1 and not sought.draws and (given := likeliest()) is not None:
            self.found = self._of_ids(given())
        elif wanted:
            self.found = best_of_shards(own, batch, sought, shards, self._finder)
        return shards.columns(own) if self.found is None else own

    def _of_ids(self, ids: Sequence[int]) -> FoundInParts | None:
        """By the likeliest of each row, where nothing else is sought."""
        if NOT_CHOSEN in ids:
            return None
        none = [NOT_CHOSEN] * len(ids)
        return FoundInParts(
            ids=[(token,) for token in ids], logits=[()] * len(ids), drawn=none, vocabulary=self._output.out_features
        )


def best_of_ranks(output: nn.Module | None, library: Library | None, *, on_device: bool = False) -> BestOfRanks | None:
    """For a stage with this output layer; None: it has none that ranks share, or there are no native kernels.

    Args:
        on_device: logits are found where they lie, as on a GPU, whose passes are captured.
    """
    if not isinstance(output, ShardedOutput):
        return None
    if on_device:
        return BestOfRanks(output, DevicePartFinder(), captured=True)
    return None if library is None else BestOfRanks(output, PartFinder(library))


def best_of_shards(
    own: torch.Tensor, batch: Sequence[Rows], sought: Sought, shards: StageRanks, finder: FindsInPart
) -> FoundInParts | None:
    """What is sought of each row. All ranks call this with their parts, and get the same.

    Args:
        own: [rows read, vocabulary / ranks], float32: this rank's part of the logits.

    Returns:
        None where parts do not say what whole rows would: a logit is not a number, the greatest is not finite, a part has
        fewer than are sought above -inf, equals of the last one that top-k leaves may not have been told, or rounding could
        decide what is drawn.

    Raises:
        TargetLost: another rank is gone.
    """
    k, length = sought.ids, own.shape[1]
    draws = {row: (position, draw) for row, position, draw in sought.of_rows(batch)}
    of_all = {row: told for row, told in draws.items() if not told[1].top_k}
    asked = [DrawnRow(row, position, draw.seed, draw.temperature) for row, (position, draw) in of_all.items()]
    told = shards.rows(finder.told(own, k, asked, shards.index * length)).cpu()
    of_likeliest = 2 * k * len(own)
    of_rows = told[:, :of_likeliest].view(shards.count, len(own), 2, k)
    of_draws = told[:, of_likeliest:].view(shards.count, len(asked), 3)
    ids, logits, tokens = list[tuple[int, ...]](), list[tuple[float, ...]](), [NOT_CHOSEN] * len(own)
    for row, parts in enumerate(zip(*of_rows.tolist(), strict=True)):
        pairs = _merged(parts, length)
        _, draw = draws.get(row, (0, None))
        if len(pairs) < shards.count * k or (draw is not None and draw.top_k and not _says_all(pairs, k, parts, draw)):
            return None
        ids.append(tuple([each for _, each in pairs[:k]]))
        logits.append(tuple([-value for value, _ in pairs[:k]]))
    for row, best in zip(of_all, zip(*of_draws.tolist(), strict=True), strict=True):
        tokens[row] = leads(best)
        if tokens[row] == UNDECIDED:
            return None
    return FoundInParts(ids=ids, logits=logits, drawn=tokens, vocabulary=shards.count * length)


def _likeliest_told(own: torch.Tensor, k: int, finder: LikeliestKernel) -> list[float]:
    """What a rank tells of the likeliest of each row, see ``FindsInPart``.

    Lists, since few numbers take less time so than in arrays.
    """
    rows = own.numpy()
    tops = rows.argmax(1).tolist()
    # The kernel passes over what is not a number; the greatest of a row is none then, by numpy.
    usable = all(math.isfinite(row.item(top)) for row, top in zip(rows, tops, strict=True))
    found = None
    if usable:
        found = [(top,) for top in tops] if k == 1 else finder.find(own, range(len(rows)), k)
    if found is None:
        return [-math.inf] * (2 * k * len(rows))
    return [
        number for row, places in zip(rows, found, strict=True) for number in (*map(row.item, places), *map(float, places))
    ]


def _merged(parts: Sequence[tuple[list[float], list[float]]], length: int) -> list[_Pair]:
    """What the parts of a row tell, greatest first; of equals the lowest ids come first."""
    pairs = [
        (-value, rank * length + int(at))
        for rank, (values, places) in enumerate(parts)
        for value, at in zip(values, places, strict=True)
        if value > -math.inf
    ]
    pairs.sort()
    return pairs


def _says_all(pairs: Sequence[_Pair], k: int, parts: Sequence[tuple[list[float], list[float]]], draw: Draw) -> bool:
    """Whether the first ``k`` pairs hold all that top-k leaves: also what equals its last, divided by the temperature."""
    temperature = np.float32(draw.temperature)
    last = np.float32(-pairs[draw.top_k - 1][0]) / temperature
    # The next pair is the greatest that is left out; what a part has not told is at most its last one.
    beyond = [*[-value for value, _ in pairs[k : k + 1]], *[values[-1] for values, _ in parts]]
    return all(np.float32(value) / temperature < last for value in beyond)
