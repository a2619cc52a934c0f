"""Scores of documents on disk, so that an interrupted build can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval_index.perplexity import Score
from speculation.files import write_whole

_LINES, _ROWS = "scores.jsonl", "likely.bin"


class ScoreFile:
    """Appends scores and reads them back. An entry that a crash has cut off is dropped.

    Args:
        key: everything besides the documents that the scores depend on; scores with another key are dropped.
        width: columns of ``Score.likely``.

    Attributes:
        perplexities: perplexity by the document's digest.
    """

    def __init__(self, folder: Path, key: str, width: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines, self._rows, self._width = folder / _LINES, folder / _ROWS, width
        self.perplexities: dict[str, float] = {}
        # First row and number of rows of each document.
        self._places: dict[str, tuple[int, int]] = {}
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
            self._places[digest] = (rows, more)
            rows += more
            kept.append(line)
        self._key = key
        self._end = rows
        write_whole(self._lines, "".join(line + "\n" for line in kept).encode())
        with self._rows.open("ab") as file:
            file.truncate(4 * width * rows)

    def _read_lines(self) -> list[str]:
        return self._lines.read_text().splitlines() if self._lines.exists() else []

    def add(self, digest: str, score: Score) -> None:
        """Append the score of the document with this digest."""
        with self._rows.open("ab") as file:
            file.write(np.ascontiguousarray(score.likely, dtype="<u4").tobytes())
        perplexity = score.perplexity
        entry = {"key": self._key, "digest": digest, "perplexity": perplexity, "rows": len(score.likely)}
        with self._lines.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
        self.perplexities[digest] = perplexity
        self._places[digest] = (self._end, len(score.likely))
        self._end += len(score.likely)

    def likely(self, digests: Sequence[str]) -> Iterator[NDArray[np.uint32]]:
        """``Score.likely``, [tokens, width], of each of these documents, all of which have a score."""
        if not self._end:
            return
        with self._rows.open("rb") as rows:
            for digest in digests:
                start, count = self._places[digest]
                rows.seek(4 * self._width * start)
                yield np.fromfile(rows, dtype="<u4", count=count * self._width).reshape(-1, self._width)
