"""Checks at every start, on a few rows, whether a token's logits are the same bits whatever shares its pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.verifier.target_port import Rows

if TYPE_CHECKING:
    from services.verifier.target import TransformersTarget

_ROWS = 12


def is_exact(target: TransformersTarget) -> bool:
    """Whether rows give the same bits in a prompt chunk, in a tree, with streams and beside another request as alone."""
    text = tuple(at % target.vocab_size for at in range(1, _ROWS + 1))

    def computed(*batch: Rows) -> torch.Tensor:
        """Logits of the last request's rows, [rows, vocabulary]. Keeps the chains of all requests."""
        made = target.forward(batch)[-1]
        for rows in batch:
            target.keep(rows.session_id, rows.context, range(rows.chain))
        return made

    def rows(name: str, start: int, end: int, logits: int) -> Rows:
        return Rows(session_id=name, context=start, tokens=text[start:end], logits=logits)

    names = ("alone", "beside", "other")
    for name in names:
        target.open(name, 2 * len(text) + (0 if target.late is None else 2 * target.late.streams))
    try:
        alone = [computed(rows("alone", 0, 9, 9))]
        alone += [computed(rows("alone", at, at + 1, 1)) for at in range(9, _ROWS)]
        beside = [computed(rows("beside", 0, 4, 4))]
        beside += [computed(rows("other", 0, 7, 1), rows("beside", 4, 9, 5))]
        nodes, parents = (text[9], 1, text[10], 2, text[11]), (-1, -1, 0, 1)
        ends = () if target.late is None else (0, len(nodes) - 1)
        tree = Rows(session_id="beside", context=9, tokens=nodes, parents=parents, logits=len(nodes), ends=ends)
        beside += [computed(rows("other", 7, _ROWS, 1), tree)[[0, 2, 4]]]
    finally:
        for name in names:
            target.close(name)
    return torch.equal(torch.cat(beside), torch.cat(alone))
