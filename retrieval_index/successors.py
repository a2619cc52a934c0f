"""The snapshot that recycling begins with: after every token of the corpus, what the target held likely most often.

The file's form is ``speculation.successors``'s.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speculation import successors


def build(rows: NDArray[np.uint32], vocab_size: int, folder: Path) -> None:
    """Write the snapshot.

    Args:
        rows: [tokens, 1 + k]: a token, and what was likeliest after it, likeliest first.
    """
    k = rows.shape[1] - 1
    counted: dict[int, Counter[int]] = {}
    for token, *likely in rows.tolist():
        counter = counted.setdefault(token, Counter())
        for rank, follower in enumerate(likely):
            # The likelier, the more it counts.
            counter[follower] += k - rank
    table = successors.empty(vocab_size, k)
    for token, counter in counted.items():
        table[token] = [follower for follower, _ in counter.most_common(k)]
    successors.write(folder / successors.FILE, table)
