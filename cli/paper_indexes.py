"""The indexes of SPECTRA's tables, made where none is named, so that a fresh clone has all rows."""

from __future__ import annotations

import hashlib
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.index_building import built_index

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from retrieval_index.corpus import Document

# Of documents of low perplexity, of all, and of those that other ways keep by the same scores.
KEPT: dict[str, dict[str, Any]] = {
    "filtered": {"keep": 0.3},
    "unfiltered": {"keep": 1.0},
    "by-tokens": {"keep": 0.3, "keep_by": "tokens"},
    "by-length": {"keep": 0.3, "keep_by": "length"},
}
# Modules of Python's library that are longer, in bytes, would be most of the index.
_LONGEST = 32_000


def python_library() -> list[Path]:
    """What is at hand on every machine: the modules of this Python's standard library, but for the longest."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(folder.glob("*.py")) if 0 < path.stat().st_size <= _LONGEST]


def made_indexes(corpus: Sequence[Path], model: ResolvedModel, cache: Path) -> dict[str, Path]:
    """Folders of the indexes of a corpus, by the names in ``KEPT``. What an earlier call built is used again.

    Args:
        corpus: files, and folders of them; none: ``python_library``.
        cache: folder of what can be made again.

    Raises:
        ConfigurationError: the corpus cannot be read.
    """
    from retrieval_index.builder import SCORES, BuildConfig
    from retrieval_index.corpus import read_corpus
    from retrieval_index.manifest import FILE
    from services.model_files.folder import model_fingerprint

    documents = read_corpus(corpus or python_library())
    folder = cache / "paper-indexes" / _digest(documents, model_fingerprint(model.path))
    made = {name: folder / name for name in KEPT}
    for name, out in made.items():
        if (out / FILE).is_file():
            continue
        out.mkdir(parents=True, exist_ok=True)
        # All documents are scored once.
        scored = made["filtered"] / SCORES
        if name != "filtered" and not (out / SCORES).exists():
            shutil.copytree(scored, out / SCORES)
        built_index(documents, model, out, BuildConfig(**KEPT[name]))
    return made


def _digest(documents: Sequence[Document], fingerprint: str) -> str:
    of_all = hashlib.sha256(fingerprint.encode())
    for document in documents:
        of_all.update(document.digest.encode())
    return of_all.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedIndexes:
    """The indexes that rows look up in: those that are named, or those of a corpus, made once the model is known."""

    index: Path | None = None
    unfiltered_index: Path | None = None
    others: Sequence[Path] = ()
    corpus: Sequence[Path] | None = None

    @property
    def notes(self) -> list[str]:
        """What the page says of them."""
        if self.corpus is None:
            return []
        told = " ".join(map(str, self.corpus)) or "the modules of Python's standard library"
        return [f"Indexes that were not named hold {told}; the paper's hold conversations and code."]

    def folders(self, model: ResolvedModel, cache: Path) -> dict[str, Any]:
        """Their folders, by the fields of ``PaperConfig``. Those that are named are checked before any is made.

        Raises:
            ConfigurationError: a named one cannot be read, or is of another tokenizer.
        """
        from retrieval_index.index import check_index
        from retrieval_index.manifest import read_manifest
        from services.model_files.folder import tokenizer_digest

        for folder in (self.index, self.unfiltered_index, *self.others):
            if folder is not None:
                check_index(read_manifest(folder), tokenizer_digest(model.path), str(folder), semantic=False)
        if self.corpus is None:
            return {"index": self.index, "unfiltered_index": self.unfiltered_index, "other_indexes": self.others}
        made = made_indexes(self.corpus, model, cache)
        own = {"index": made.pop("filtered"), "unfiltered_index": made.pop("unfiltered")}
        return {**own, "other_indexes": [*made.values(), *self.others]}
