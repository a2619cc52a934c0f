"""The likeliest ids after rows of a pass, for those who ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from services.verifier.choosing.candidates import likeliest, rows_of
from services.verifier.choosing.reading import LogitsReader
from services.verifier.choosing.walks import Walk
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from services.verifier.model.to_device import on_the_way

# Of each walk, the ids after each of its rows.
Tops = list[tuple[tuple[int, ...], ...]]


def send_likeliest(
    walks: Sequence[Walk], logits: torch.Tensor, finder: LikeliestKernel | None, reader: LogitsReader
) -> Callable[[], Tops]:
    """Gives the likeliest ids of walks that ask for them; one call for all that ask for the same number.

    From a device they are on their way by now. Who asks for none has none.

    Args:
        finder: finds them on a host.
    """
    sent: list[tuple[list[int], Callable[[], list[list[int]]]]] = []
    for k in {walk.rows.top_k for walk in walks if walk.rows.top_k and walk.rows.logits}:
        asking = [at for at, walk in enumerate(walks) if walk.rows.top_k == k]
        rows = [walks[at].first_row + row for at in asking for row in range(walks[at].rows.logits)]
        own = finder.find(logits, rows, k) if finder is not None and reader.on_host(logits) else None
        gives = on_the_way(likeliest(rows_of(logits, rows), k, reader)) if own is None else partial(list, own)
        sent.append((asking, gives))

    def found() -> Tops:
        tops: Tops = [()] * len(walks)
        for asking, gives in sent:
            ids = [*map(tuple, gives())]
            end = 0
            for at in asking:
                begin, end = end, end + walks[at].rows.logits
                tops[at] = tuple(ids[begin:end])
        return tops

    return found
