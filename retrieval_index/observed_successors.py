"""Builds the successor table that recycling starts with, from the target's top-k after every scored token of the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speculation import successor_table as successors


def build(documents: Iterable[NDArray[np.uint32]], vocab_size: int, folder: Path) -> None:
    """Write the table, in the format of ``speculation.successor_table``.

    Args:
        documents: for each document [tokens, 1 + k]: a token id and the k likeliest ids after it, likeliest first.
        vocab_size: ids from here on are left out (the output layers of some models are padded).
    """
    counted: dict[int, Counter[int]] = {}
    k = 1
    for rows in documents:
        k = max(k, rows.shape[1] - 1)
        for token, *likely in rows.tolist():
            counter = counted.setdefault(token, Counter())
            for rank, follower in enumerate(likely):
                if follower < vocab_size:
                    # Likelier successors weigh more.
                    counter[follower] += k - rank
    table = successors.empty(vocab_size, k)
    for token, counter in counted.items():
        best = [follower for follower, _ in counter.most_common(k)]
        if token < vocab_size and best:
            # A row with fewer than k successors repeats the last one.
            table[token] = best + best[-1:] * (k - len(best))
    successors.write(folder / successors.FILE, table)
