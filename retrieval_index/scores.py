"""Scores of documents on disk, so that an interrupted build goes on where it stood."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval_index.perplexity import Score

_LINES, _ROWS = "scores.jsonl", "likely.bin"


class ScoreFile:
    """Appends scores and reads them back. A line and its rows that were cut off by a crash are dropped.

    Args:
        key: of what the scores depend on besides the documents; scores made under another key are thrown away.
        width: numbers in each row of ``Score.likely``.
    """

    def __init__(self, folder: Path, key: str, width: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._rows, self._width = folder / _LINES, folder / _ROWS, width
        self.perplexities: dict[str, float] = {}
        kept, rows = [], 0
        available = self._rows.stat().st_size // (4 * width) if self._rows.exists() else 0
        for line in self._read_lines():
            try:
                entry = json.loads(line)
                digest, perplexity, more = str(entry["digest"]), float(entry["perplexity"]), int(entry["rows"])
            except (ValueError, KeyError, TypeError):
                break
            if entry.get("key") != key or rows + more > available:
                break
            self.perplexities[digest] = perplexity
            rows += more
            kept.append(line)
        self._key = key
        self._lines.write_text("".join(line + "\n" for line in kept))
        with self._rows.open("ab") as file:
            file.truncate(4 * width * rows)

    def _read_lines(self) -> list[str]:
        return self._lines.read_text().splitlines() if self._lines.exists() else []

    def add(self, digest: str, score: Score) -> None:
        """Keep the score of the document with this digest."""
        with self._rows.open("ab") as file:
            file.write(np.ascontiguousarray(score.likely, dtype="<u4").tobytes())
        perplexity = score.perplexity
        entry = {"key": self._key, "digest": digest, "perplexity": perplexity, "rows": len(score.likely)}
        with self._lines.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        self.perplexities[digest] = perplexity

    def likely(self) -> NDArray[np.uint32]:
        """[tokens, width]: all rows of all scored documents."""
        if not self._rows.stat().st_size:
            return np.zeros((0, self._width), dtype="<u4")
        return np.memmap(self._rows, dtype="<u4", mode="r").reshape(-1, self._width)


def limit_for(perplexities: list[float], keep: float) -> float:
    """The highest perplexity among the ``keep`` share of documents with the lowest."""
    ordered = sorted(perplexities)
    return ordered[max(0, math.ceil(keep * len(ordered)) - 1)]
