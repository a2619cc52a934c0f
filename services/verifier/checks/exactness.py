"""Checks at every start, on a few rows, whether a token's logits are the same bits whatever shares its pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.verifier.kernels.cpu_choice import Choice
from services.verifier.model.stream_rows import StreamRows
from services.verifier.model.target_port import Rows


class _Target(Protocol):
    """What is asked of the target under test; see ``services.verifier.model.target``."""

    vocab_size: int
    max_model_len: int

    @property
    def kernels(self) -> Choice: ...

    @property
    def stream_rows(self) -> StreamRows | None: ...

    def open(self, request_id: str, rows: int) -> bool: ...

    def keep(self, request_id: str, context: int, rows: Sequence[int]) -> None: ...

    def forward(self, batch: Sequence[Rows]) -> list[torch.Tensor]: ...

    def close(self, request_id: str) -> None: ...


_ROWS = 12
# Of the request beside. On a GPU so many that a pass has other kernels than one of few rows (``row_products``).
_FEW, _MANY = 7, 70


def is_exact(target: _Target) -> bool:
    """Whether rows give the same bits in a prompt chunk, in a tree, with streams and beside another request as alone."""
    text = tuple(at % target.vocab_size for at in range(1, _MANY + _ROWS + 1))

    def computed(*batch: Rows) -> torch.Tensor:
        """Logits of the last request's rows, [rows, vocabulary]. Keeps the chains of all requests."""
        made = target.forward(batch)[-1]
        for rows in batch:
            target.keep(rows.request_id, rows.context, range(rows.chain))
        return made

    def rows(name: str, start: int, end: int, logits: int) -> Rows:
        return Rows(request_id=name, context=start, tokens=text[start:end], logits=logits)

    names = ("alone", "beside", "other")
    room = 2 * _ROWS + (0 if target.stream_rows is None else 2 * target.stream_rows.streams)
    for name in names[:2]:
        target.open(name, room)
    crowd = _MANY if _takes_many(target) and target.open("other", _MANY + room) else _FEW
    if crowd == _FEW:
        target.open("other", room)
    try:
        alone = [computed(rows("alone", 0, 9, 9))]
        alone += [computed(rows("alone", at, at + 1, 1)) for at in range(9, _ROWS)]
        beside = [computed(rows("beside", 0, 4, 4))]
        beside += [computed(rows("other", 0, crowd, 1), rows("beside", 4, 9, 5))]
        nodes, parents = (text[9], 1, text[10], 2, text[11]), (-1, -1, 0, 1)
        ends = () if target.stream_rows is None else (0, len(nodes) - 1)
        tree = Rows(request_id="beside", context=9, tokens=nodes, parents=parents, logits=len(nodes), ends=ends)
        beside += [computed(rows("other", crowd, crowd + 5, 1), tree)[[0, 2, 4]]]
    finally:
        for name in names:
            target.close(name)
    return torch.equal(torch.cat(beside), torch.cat(alone))


def _takes_many(target: _Target) -> bool:
    """Whether a pass of many rows is cheap, and has other kernels."""
    return target.kernels.linears in ("triton", "cublaslt") and target.max_model_len >= _MANY + _ROWS
