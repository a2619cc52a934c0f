"""Small indexes, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from retrieval_index import keeping
from retrieval_index.builder import BuildConfig, ScoringTarget, build_index
from retrieval_index.corpus import Document
from retrieval_index.keeping import KeepBy
from retrieval_index.manifest import Manifest
from retrieval_index.perplexity import ModelScorer, Score
from services.model_files.folder import tokenizer_digest

TARGET = ScoringTarget(name="tiny", tokenizer_sha256="a" * 64, vocab_size=256)


class ByteScorer:
    """Finds texts with many different bytes surprising; after a byte the next two are likeliest."""

    def __init__(self) -> None:
        self.scored: list[list[int]] = []
        self.computed: list[list[int]] = []

    def score(self, documents: Sequence[Sequence[int]]) -> list[Score]:
        self.scored += [list(document) for document in documents]
        return [self._score(document) for document in documents]

    def _score(self, document: Sequence[int]) -> Score:
        ids = np.asarray(document[:-1], dtype=np.uint32)
        likely = np.stack([ids, (ids + 1) % 256, (ids + 2) % 256], axis=1)
        return Score(nll=float(np.log(len(set(document)))), tokens=len(ids), likely=likely)

    def states(self, documents: Sequence[Sequence[int]]) -> list[NDArray[np.float16]]:
        """After equal tokens equal states, after others others: a direction for each byte."""
        self.computed += [list(document) for document in documents]
        return [STATES[np.asarray(document, dtype=np.int64)] for document in documents]


# [256, 16]
STATES = np.random.default_rng(0).standard_normal((256, 16)).astype(np.float16)


def encode(text: str) -> list[int]:
    return list(text.encode())


def document(text: str) -> Document:
    import hashlib

    return Document(text=text, digest=hashlib.sha256(text.encode()).hexdigest(), origin="test")


def build(
    out: Path,
    texts: Sequence[str],
    *,
    keep: float = 1.0,
    keep_by: KeepBy = "documents",
    score_tokens: int | None = 64,
    scorer: ByteScorer | None = None,
    target: ScoringTarget = TARGET,
    semantic: bool = False,
    histogram: bool = False,
) -> Manifest:
    """An index of bytes; unless asked for without its histogram, which takes longer to draw than all the rest."""
    found = scorer or ByteScorer()
    config = BuildConfig(keep=keep, keep_by=keep_by, depth=8, score_tokens=score_tokens, top_k=2, semantic=semantic)
    with nullcontext() if histogram else patch.object(keeping, "draw_histogram"):
        return build_index([document(text) for text in texts], target, encode, lambda: found, out, config)


def build_of(out: Path, model: Path, tokens: Sequence[int]) -> Manifest:
    """An index for a tiny model, whose whole corpus is these tokens."""
    target = ScoringTarget(name="tiny", tokenizer_sha256=tokenizer_digest(model), vocab_size=320)
    return build_index(
        [document(str(out))], target, lambda text: list(tokens), lambda: ModelScorer(model), out, BuildConfig(keep=1.0)
    )
