"""The likeliest ids after rows of a pass, for those who ask for them, and how likely they are after rows of noise."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain

import torch

from services.verifier.choosing.candidates import likeliest, rows_of
from services.verifier.choosing.reading import LogitsReader
from services.verifier.choosing.walks import Walk
from services.verifier.kernels.native.likeliest_kernel import LikeliestKernel
from services.verifier.model.target_port import Outcome, Rows
from services.verifier.model.to_device import on_the_way
from services.verifier.model.tree_rows import TreeRows, counts_of, top_ks_of
from speculation.id_rows import IdRows

# Of each entry, the ids after each of its rows.
Tops = list[Sequence[tuple[int, ...]]]
# Sends for them, of a batch and its logits, and returns what gives them.
SendLikely = Callable[[Sequence[Rows], torch.Tensor], Callable[[], Tops]]


def send_likeliest(
    batch: Sequence[Rows], logits: torch.Tensor, finder: LikeliestKernel | None, reader: LogitsReader
) -> Callable[[], Tops]:
    """Gives the likeliest ids after rows of entries that ask for them; one call for all that ask for the same number.

    From a device they are on their way by now. Who asks for none has none.

    Args:
        finder: finds them on a host.
    """
    sent: list[tuple[list[int], Callable[[], list[list[int]]]]] = []
    top_ks, counts = top_ks_of(batch), counts_of(batch)
    wanted = {k for k, count in zip(top_ks, counts, strict=True) if k and count}
    # Most passes ask for none.
    ends = [*accumulate(counts if isinstance(batch, TreeRows) else [rows.read for rows in batch])] if wanted else []
    for k in wanted:
        asking = [at for at, own in enumerate(top_ks) if own == k]
        asked = [row for at in asking for row in range(ends[at] - counts[at], ends[at])]
        own = finder.find(logits, asked, k) if finder is not None and reader.on_host(logits) else None
        gives = on_the_way(likeliest(rows_of(logits, asked), k, reader)) if own is None else partial(list, own)
        sent.append((asking, gives))

    def found() -> Tops:
        tops: Tops = [()] * len(batch)
        for asking, gives in sent:
            ids, end = array("i", chain.from_iterable(gives())), 0
            for at in asking:
                begin, end = end, end + counts[at] * top_ks[at]
                tops[at] = IdRows(ids[begin:end], top_ks[at])
        return tops

    return found


def with_chances(outcome: Outcome, walk: Walk, logits: torch.Tensor) -> Outcome:
    """The outcome, with how likely the likeliest ids after its rows of noise are."""
    rows, tops = walk.rows, outcome.top_ids
    if not rows.noise or not tops:
        return outcome
    noise = [row - (rows.chain - 1) for row in rows.noise]
    logs = rows_of(logits, [walk.first_row + row for row in noise]).log_softmax(-1)
    ids = torch.tensor([tops[row] for row in noise], device=logits.device)
    chances: list[tuple[float, ...]] = [()] * len(tops)
    for row, own in zip(noise, logs.gather(1, ids).exp().tolist(), strict=True):
        chances[row] = tuple(own)
    return replace(outcome, chances=tuple(chances))
