"""The snapshot that recycling begins with: after every token of the corpus, what the target held likely most often.

The file's form is ``speculation.successor_table``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from speculation import successor_table as successors


def build(documents: Iterable[NDArray[np.uint32]], vocab_size: int, folder: Path) -> None:
    """Write the snapshot.

    Args:
        documents: of each, [tokens, 1 + k]: a token, and what was likeliest after it, likeliest first.
        vocab_size: ids from it on (some models' output layers are padded) are left out.
    """
    counted: dict[int, Counter[int]] = {}
    k = 1
    for rows in documents:
        k = max(k, rows.shape[1] - 1)
        for token, *likely in rows.tolist():
            counter = counted.setdefault(token, Counter())
            for rank, follower in enumerate(likely):
                if follower < vocab_size:
                    # The likelier, the more it counts.
                    counter[follower] += k - rank
    table = successors.empty(vocab_size, k)
    for token, counter in counted.items():
        best = [follower for follower, _ in counter.most_common(k)]
        if token < vocab_size and best:
            # Where fewer are known, the last one fills the row.
            table[token] = best + best[-1:] * (k - len(best))
    successors.write(folder / successors.FILE, table)
