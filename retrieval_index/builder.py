"""``outrider index build``: corpus -> perplexity filter -> trie and successor table -> manifest.

Files are written to a working folder inside the index's folder and moved into place together, so an interrupted build leaves
no half index. Scores are kept on disk: a build that is started again, also with another ``keep``, reuses them.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval_index import keeping, ngram_trie
from retrieval_index import observed_successors as successors
from retrieval_index.corpus import Document
from retrieval_index.keeping import WAYS, KeepBy, kept_documents
from retrieval_index.manifest import (
    FILE,
    MAX_DEPTH,
    MAX_SHARDS,
    MIN_DEPTH,
    SEMANTIC,
    Manifest,
    part_names,
    part_of,
    trie_files,
)
from retrieval_index.perplexity import Score, Scorer
from retrieval_index.progress import Advance, batches, silent
from retrieval_index.score_file import ScoreFile
from retrieval_index.state_file import StateFile
from speculation.errors import ConfigurationError
from speculation.files import write_whole

HISTOGRAM = "perplexity.png"
SCORES = "scores"
_WORKING = "building"
# Tokens that the target reads at a time where whole documents are scored.
_WINDOW = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """How an index is built.

    Attributes:
        keep: share to keep, documents with the lowest perplexity; 1 keeps all.
        keep_by: what ``keep`` is a share of, see ``kept_documents``.
        depth: longest n-gram of the trie, in tokens.
        score_tokens: tokens of a document that are scored, counted from its beginning; None: all, in windows that the target
            can read.
        top_k: successors in the successor table for each token.
        semantic: whether the hidden states of the kept documents are indexed too, computed in windows of the same length.

    Raises:
        ConfigurationError: a value is out of range; names the command-line option.
    """

    keep: float = 0.3
    keep_by: KeepBy = "documents"
    depth: int = 16
    score_tokens: int | None = 256
    top_k: int = 8
    semantic: bool = False

    def __post_init__(self) -> None:
        tokens = self.score_tokens
        for field, value, right, allowed in (
            ("--depth", self.depth, MIN_DEPTH <= self.depth <= MAX_DEPTH, f"from {MIN_DEPTH} to {MAX_DEPTH}"),
            ("--score-tokens", tokens, tokens is None or 8 <= tokens <= 8192, "from 8 to 8192, or all"),
            ("--keep", self.keep, 0 < self.keep <= 1, "above 0, at most 1"),
            ("--keep-by", self.keep_by, self.keep_by in WAYS, ", ".join(WAYS)),
        ):
            if not right:
                raise ConfigurationError(field=field, verb="", value=value, allowed=allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringTarget:
    """The model for which the index is built. ``context``: most tokens that it can read at a time."""

    name: str
    tokenizer_sha256: str
    vocab_size: int
    context: int = _WINDOW


class Encode(Protocol):
    """Turns a text into token ids, without special tokens."""

    def __call__(self, text: str) -> Sequence[int]: ...


def build_index(
    documents: Sequence[Document],
    target: ScoringTarget,
    encode: Encode,
    scorer: Callable[[], Scorer],
    out: Path,
    config: BuildConfig,
    advance: Advance = silent,
) -> Manifest:
    """Build an index in the folder ``out``.

    Args:
        scorer: loads the model; called only if something remains to be scored.
        advance: called with the progress of each stage.

    Raises:
        ConfigurationError: ``out`` holds something else, or no document is left after filtering.
    """
    _check_out(out)
    keeping.check_can_draw()
    tokens = [np.asarray(encode(d.text), dtype=np.uint32) for d in _counting(documents, "reading", advance)]
    key = f"{target.tokenizer_sha256}/{target.name}/{config.score_tokens or 'all'}/{config.top_k}"
    scores = ScoreFile(out / SCORES, key, 1 + config.top_k)
    window = min(config.score_tokens or _WINDOW, target.context)
    _score(documents, [ids[: config.score_tokens] for ids in tokens], scores, scorer, window, advance)
    perplexities = [scores.perplexities[document.digest] for document in documents]
    chosen = _filtered(perplexities, tokens, config)
    kept = [ids for ids, stays in zip(tokens, chosen, strict=True) if stays]
    limit = _highest(perplexities, chosen) if config.keep < 1 else None
    finished = out / _WORKING
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    grams, shards = ngram_trie.build(kept, config.depth, finished, advance=partial(advance, "building the trie"))
    if not grams:
        raise ConfigurationError("nothing is left of the corpus: its documents are too short; raise --keep", about="--keep")
    successors.build(scores.likely([document.digest for document in documents]), target.vocab_size, finished)
    states = StateFile(out / SCORES, key)
    if config.semantic:
        _index_states(states, [ids for ids in kept if len(ids)], scorer, finished, window, advance)
    keeping.draw_histogram(perplexities, max(perplexities) if limit is None else limit, finished / HISTOGRAM)
    manifest = Manifest(
        model=target.name,
        tokenizer_sha256=target.tokenizer_sha256,
        vocab_size=target.vocab_size,
        documents=len(documents),
        kept=len(kept),
        tokens=sum(map(len, kept)),
        depth=config.depth,
        perplexity_limit=limit,
        keep_by="documents" if limit is None else config.keep_by,
        whole_documents=config.score_tokens is None,
        parts={name: part_of(finished / name) for name in part_names(len(shards), semantic=config.semantic)},
        shards=shards,
    )
    _put_in_place(finished, out, manifest)
    finished.rmdir()
    states.delete()
    return manifest


def _index_states(
    states: StateFile,
    kept: Sequence[NDArray[np.uint32]],
    scorer: Callable[[], Scorer],
    folder: Path,
    window: int,
    advance: Advance,
) -> None:
    # FAISS is imported only for builds that need it.
    from retrieval_index import state_index

    computed, tokens = states.fill(kept, window, scorer, advance)
    advance("indexing hidden states", 0, 1)
    state_index.build(computed, tokens, folder)
    advance("indexing hidden states", 1, 1)


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigurationError("is a file; give a folder", field="--out", verb="", value=out)
    if out.is_dir() and any(out.iterdir()) and not (out / FILE).exists() and not (out / SCORES).exists():
        raise ConfigurationError(
            "holds other things; give a new folder, or one of an earlier build", field="--out", verb="", value=out
        )


def _put_in_place(finished: Path, out: Path, manifest: Manifest) -> None:
    # A folder without a manifest is not an index: the old one is removed first, the new one is written last.
    for name in (FILE, *SEMANTIC, *(name for shard in range(1, MAX_SHARDS) for name in trie_files(shard))):
        (out / name).unlink(missing_ok=True)
    for file in finished.iterdir():
        os.replace(file, out / file.name)
    write_whole(out / FILE, manifest.to_json().encode())


def _filtered(perplexities: Sequence[float], tokens: Sequence[NDArray[np.uint32]], config: BuildConfig) -> list[bool]:
    if config.keep == 1:
        return [True] * len(tokens)
    return kept_documents(perplexities, [len(ids) for ids in tokens], config.keep, config.keep_by)


def _highest(perplexities: Sequence[float], chosen: Sequence[bool]) -> float:
    """The highest perplexity that was kept. Documents too short to be scored have none."""
    kept = [value for value, stays in zip(perplexities, chosen, strict=True) if stays and math.isfinite(value)]
    return max(kept, default=math.inf)


def _score(
    documents: Sequence[Document],
    tokens: Sequence[NDArray[np.uint32]],
    scores: ScoreFile,
    scorer: Callable[[], Scorer],
    window: int,
    advance: Advance,
) -> None:
    """Score the documents that have no score yet; documents of similar length share a pass.

    Args:
        tokens: of each document those that are scored.
        window: most tokens of a pass; longer documents are read in parts, each beginning with the last token before it.
    """
    missing = [n for n, document in enumerate(documents) if document.digest not in scores.perplexities]
    missing.sort(key=lambda number: len(tokens[number]))
    total, done = len(documents), len(documents) - len(missing)
    advance("perplexity", done, total)
    if not missing:
        return
    model = scorer()
    waiting = [(number, *part) for number in missing for part in _parts(tokens[number], window)]
    found: list[Score] = []
    for batch in batches(waiting, lambda each: len(each[1])):
        for (number, _, last), score in zip(batch, model.score([ids.tolist() for _, ids, _ in batch]), strict=True):
            found.append(score)
            if last:
                scores.add(documents[number].digest, Score.joined(found))
                found = []
                done += 1
        advance("perplexity", done, total)


def _parts(ids: NDArray[np.uint32], window: int) -> list[tuple[NDArray[np.uint32], bool]]:
    """The tokens in parts of at most ``window``, and whether a part is the last one.

    A part begins with the last token of the one before, so that every token but the first has something before it.
    """
    starts = range(0, max(1, len(ids) - 1), window - 1)
    return [(ids[start : start + window], start == starts[-1]) for start in starts]


def _counting(documents: Sequence[Document], stage: str, advance: Advance) -> Iterator[Document]:
    for number, document in enumerate(documents, 1):
        yield document
        if number % 50 == 0 or number == len(documents):
            advance(stage, number, len(documents))
