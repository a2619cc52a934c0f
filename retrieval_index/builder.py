"""``outrider index build``: corpus -> perplexity filter -> trie and successor table -> manifest.

Files are written to a working folder inside the index's folder and moved into place together, so an interrupted build leaves
no half index. Scores are kept on disk: a build that is started again, also with another ``keep``, reuses them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval_index import ngram_trie, plot
from retrieval_index import observed_successors as successors
from retrieval_index.corpus import Document
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
from retrieval_index.perplexity import Scorer
from retrieval_index.progress import Advance, batches, silent
from retrieval_index.scores import ScoreFile, limit_for
from retrieval_index.states import StateFile
from speculation.errors import ConfigurationError
from speculation.files import write_whole

HISTOGRAM = "perplexity.png"
SCORES = "scores"
_WORKING = "building"


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """How an index is built.

    Attributes:
        keep: share of the documents to keep, those with the lowest perplexity; 1 keeps all.
        depth: longest n-gram of the trie, in tokens.
        score_tokens: tokens of a document that are scored, counted from its beginning.
        top_k: successors in the successor table for each token.
        semantic: whether the hidden states of the kept documents are indexed too, computed in windows of ``score_tokens``.

    Raises:
        ConfigurationError: a value is out of range; names the command-line option.
    """

    keep: float = 0.3
    depth: int = 16
    score_tokens: int = 256
    top_k: int = 8
    semantic: bool = False

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("depth", self.depth, MIN_DEPTH, MAX_DEPTH),
            ("score_tokens", self.score_tokens, 8, 8192),
        ):
            if not low <= value <= high:
                raise ConfigurationError(
                    field=f"--{name.replace('_', '-')}", verb="", value=value, allowed=f"from {low} to {high}"
                )
        if not 0 < self.keep <= 1:
            raise ConfigurationError(field="--keep", verb="", value=self.keep, allowed="above 0, at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringTarget:
    """The model for which the index is built."""

    name: str
    tokenizer_sha256: str
    vocab_size: int


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
    plot.check_available()
    tokens = [np.asarray(encode(d.text), dtype=np.uint32) for d in _counting(documents, "reading", advance)]
    key = f"{target.tokenizer_sha256}/{target.name}/{config.score_tokens}/{config.top_k}"
    scores = ScoreFile(out / SCORES, key, 1 + config.top_k)
    _score(documents, tokens, scores, scorer, config, advance)
    perplexities = [scores.perplexities[document.digest] for document in documents]
    limit = limit_for(perplexities, config.keep) if config.keep < 1 else None
    kept = [ids for ids, value in zip(tokens, perplexities, strict=True) if limit is None or value <= limit]
    finished = out / _WORKING
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    grams, shards = ngram_trie.build(kept, config.depth, finished, advance=partial(advance, "building the trie"))
    if not grams:
        raise ConfigurationError("nothing is left of the corpus: its documents are too short; raise --keep", about="--keep")
    successors.build(scores.likely([document.digest for document in documents]), target.vocab_size, finished)
    states = StateFile(out / SCORES, key)
    if config.semantic:
        _index_states(states, [ids for ids in kept if len(ids)], scorer, finished, config, advance)
    plot.draw_histogram(perplexities, max(perplexities) if limit is None else limit, finished / HISTOGRAM)
    manifest = Manifest(
        model=target.name,
        tokenizer_sha256=target.tokenizer_sha256,
        vocab_size=target.vocab_size,
        documents=len(documents),
        kept=len(kept),
        tokens=sum(map(len, kept)),
        depth=config.depth,
        perplexity_limit=limit,
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
    config: BuildConfig,
    advance: Advance,
) -> None:
    # FAISS is imported only for builds that need it.
    from retrieval_index import vectors

    computed, tokens = states.fill(kept, config.score_tokens, scorer, advance)
    advance("indexing hidden states", 0, 1)
    vectors.build(computed, tokens, folder)
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


def _score(
    documents: Sequence[Document],
    tokens: Sequence[NDArray[np.uint32]],
    scores: ScoreFile,
    scorer: Callable[[], Scorer],
    config: BuildConfig,
    advance: Advance,
) -> None:
    """Score the documents that have no score yet; documents of similar length share a pass."""

    def scored(number: int) -> int:
        return min(len(tokens[number]), config.score_tokens)

    missing = [n for n, document in enumerate(documents) if document.digest not in scores.perplexities]
    missing.sort(key=scored)
    total, done = len(documents), len(documents) - len(missing)
    advance("perplexity", done, total)
    if not missing:
        return
    model = scorer()
    for batch in batches(missing, scored):
        for number, score in zip(
            batch, model.score([tokens[n][: config.score_tokens].tolist() for n in batch]), strict=True
        ):
            scores.add(documents[number].digest, score)
        done += len(batch)
        advance("perplexity", done, total)


def _counting(documents: Sequence[Document], stage: str, advance: Advance) -> Iterator[Document]:
    for number, document in enumerate(documents, 1):
        yield document
        if number % 50 == 0 or number == len(documents):
            advance(stage, number, len(documents))
