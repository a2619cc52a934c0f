"""Bars the tokens that a request's rule does not allow: their logits become -inf."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.verifier.choosing.reading import READER, LogitsReader
from services.verifier.model.target_port import PackedBits
from services.verifier.model.to_device import to_device

_BARRED = float("-inf")


def bar(row: torch.Tensor, allowed: PackedBits) -> torch.Tensor:
    """[vocabulary], on the CPU, with the tokens barred that are not ``allowed``."""
    return row.masked_fill(torch.from_numpy(_unpacked(allowed, len(row)) == 0), _BARRED)


def bar_rows(logits: torch.Tensor, rules: Sequence[PackedBits | None], reader: LogitsReader = READER) -> None:
    """Bar tokens in place.

    Args:
        logits: [rows, vocabulary], float32, on any device.
        rules: [rows]; None: the row keeps all its tokens.
    """
    rows = [(at, allowed) for at, allowed in enumerate(rules) if allowed is not None]
    if not rows:
        return
    vocabulary = logits.shape[1]
    if reader.on_host(logits):
        own = logits.numpy()
        for at, allowed in rows:
            own[at, _unpacked(allowed, vocabulary) == 0] = -np.inf
        return
    # Packed, a row is an eighth of a byte per token; it is unpacked where the logits are.
    packed = to_device(np.stack([allowed for _, allowed in rows]), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    barred = ((packed[:, :, None] >> bits) & 1).flatten(1)[:, :vocabulary] == 0
    index = to_device([at for at, _ in rows], logits.device)
    logits[index] = logits[index].masked_fill_(barred, _BARRED)


def _unpacked(allowed: PackedBits, vocabulary: int) -> np.ndarray:
    return np.unpackbits(allowed, count=vocabulary, bitorder="little")
