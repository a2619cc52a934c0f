"""Builds an index of documents for a model, with progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.process.terminal import stderr

if TYPE_CHECKING:
    from cluster.models.target import ResolvedModel
    from retrieval_index.builder import BuildConfig
    from retrieval_index.corpus import Document
    from retrieval_index.manifest import Manifest


def built_index(
    documents: Sequence[Document], model: ResolvedModel, out: Path, config: BuildConfig, device: str = "cpu"
) -> Manifest:
    """Build the index of some documents in the folder ``out``, for the tokens of ``model``.

    Args:
        device: of the model while it scores documents.

    Raises:
        ConfigurationError: ``out`` holds something else, or no document is left after filtering.
    """
    from cluster.models.target import as_float32
    from retrieval_index.builder import ScoringTarget, build_index
    from retrieval_index.perplexity import ModelScorer

    digest, tokenizer = open_tokenizer(model.path)
    vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    with build_progress() as advance:
        return build_index(
            documents,
            ScoringTarget(name=model.name, tokenizer_sha256=digest, vocab_size=vocab_size, **_context(model.path)),
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            lambda: ModelScorer(as_float32(model.path, say=stderr().print), device=device, top_k=config.top_k),
            out,
            config,
            advance,
        )


def _context(model: Path) -> dict[str, int]:
    """How many tokens the model can read at a time, where its config.json says so. A recurrent one has no such end."""
    from services.model_files.folder import read_json, text_config

    config = text_config(read_json(model / "config.json"))
    found = [config.get(name) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return next(({"context": most} for most in found if isinstance(most, int) and most > 1), {})


def open_tokenizer(model: Path) -> tuple[str, Any]:
    """A model's tokenizer without truncation and padding, with its digest."""
    from tokenizers import Tokenizer

    from services.model_files.folder import tokenizer_digest

    digest = tokenizer_digest(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return digest, tokenizer


@contextmanager
def build_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars by stage; yields the function that advances them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr()) as bars:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance
