"""What a rank finds in its part of the vocabulary where logits lie on a device: few numbers of a row are made there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from services.verifier.choosing.candidates import likeliest
from services.verifier.choosing.device_choice import winners_on
from services.verifier.choosing.greatest import Finder
from services.verifier.choosing.reading import READER
from services.verifier.kernels.native.draw_kernel import DrawnRow
from services.verifier.model.target_port import NOT_CHOSEN
from services.verifier.model.to_device import to_device
from services.verifier.stages.stage_ranks import StageRanks
from speculation.philox import NoiseStream


class DevicePartFinder:
    """Implements ``FindsInPart`` by what finds tokens on a device."""

    def told(self, own: torch.Tensor, k: int, draws: Sequence[DrawnRow], first: int) -> torch.Tensor:
        places = _likeliest(own, k)
        values = own.gather(1, places)
        # The greatest is none where one is not a number, and whole rows are asked for then.
        values = torch.where(own.amax(-1).isfinite().all(), values, -math.inf)
        numbers = torch.stack([values.double(), places.double()], 1).flatten()
        return torch.cat([numbers, *([_drawn(own, draws, first)] if draws else [])])


def _likeliest(own: torch.Tensor, k: int) -> torch.Tensor:
    """[rows, k]; among equals any ids, but the first of the greatest."""
    firsts = READER.first_of_greatest(own).clamp(min=0)[:, None]
    if k == 1 or not len(own):
        return firsts.expand(-1, k)
    places = likeliest(own, k, READER)
    # Where it is missing, all that were found equal it.
    missing = (places != firsts).all(-1)
    places[:, -1] = torch.where(missing, firsts[:, 0], places[:, -1])
    return places


def _drawn(own: torch.Tensor, draws: Sequence[DrawnRow], first: int) -> torch.Tensor:
    """Of each draw the greatest sum of logit and noise, its id, and the next sum: [3 * draws], float64."""
    rows = own[to_device([draw.row for draw in draws], own.device, torch.int64)]
    rows = rows / to_device([draw.temperature for draw in draws], own.device, torch.float32)[:, None]
    nothing = rows.new_full((len(rows),), -math.inf, dtype=torch.float64)
    seeds, positions = [draw.seed for draw in draws], [draw.position for draw in draws]
    best, places, seconds = winners_on(own.device)(rows, nothing, seeds, positions, NoiseStream.CHOICE, first)
    return torch.stack([best, (places + first).double(), seconds], 1).flatten()


def over_ranks(find: Finder, shards: StageRanks) -> Finder:
    """Finds in [rows, vocabulary / ranks] what ``find`` would find in whole rows; all ranks do so at the same time.

    ``NOT_CHOSEN`` where the greatest of a part is not finite.
    """

    def found(own: torch.Tensor) -> torch.Tensor:
        places = find(own)
        values = own.gather(1, places.clamp(min=0)[:, None])[:, 0]
        told = shards.rows(torch.stack([values.double(), places.double()]))
        values, places = told[:, 0], told[:, 1]
        ids = places + own.shape[1] * torch.arange(shards.count, device=own.device)[:, None]
        first = torch.where(values == values.amax(0), ids, math.inf).amin(0)
        return torch.where((places < 0).any(0), NOT_CHOSEN, first).long()

    return found
