"""What the rows of a pass bring to states that hold values by their keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyedRows:
    """The rows of a pass, accepted rows first; all tensors are float32.

    A row lets a state decay, writes its value under its key, and reads by its query. There are fewer keys and queries than
    heads where each serves some consecutive heads.

    Attributes:
        keys, queries: [rows, key heads, key size].
        values: [rows, heads, value size].
        factors: [rows, heads, 1 or key size], by which a state decays; None: by ``exp(times * decay)``.
        times: [rows, heads, value size], with ``decay``: [heads, key size, value size].
        parts: [rows, heads], how much is written of what the state lacks of the value; None: the value itself is written.
    """

    keys: torch.Tensor
    queries: torch.Tensor
    values: torch.Tensor
    factors: torch.Tensor | None = None
    times: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    parts: torch.Tensor | None = None
