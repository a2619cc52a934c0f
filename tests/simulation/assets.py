"""What all runs of a process share, because making it takes long: a tokenizer, compiled grammars' engine, two small indexes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from llguidance import LLMatcher, LLTokenizer
from typing_extensions import override

from services.router.tokens import Tokens
from services.verifier.grammar.compiled_grammars import CompiledGrammars
from speculation.types import StructuredOutputs
from tests.drafters.indexes import build
from tests.simulation.law import EOS, LETTERS
from tests.tiny_models.tiny import make_tiny_tokenizer

# Forms of answers, small ones, whose tokens are not those that the law likes best.
GRAMMARS = (
    StructuredOutputs(kind="regex", text="[a-f]{2,6}x?"),
    StructuredOutputs(kind="choice", text='["yes", "no", "perhaps"]'),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assets:
    """Shared by all runs.

    Attributes:
        folder: a model's, with a tokenizer and without weights.
        indexes: folders of two versions of an index; ``cache``: where a retrieval service keeps what it has fetched.
    """

    folder: Path
    vocab_size: int
    tokens: Tokens
    indexes: tuple[Path, Path]
    cache: Path
    kept: tempfile.TemporaryDirectory[str]


@cache
def assets() -> Assets:
    """Make them, once in a process."""
    kept = tempfile.TemporaryDirectory(prefix="outrider-simulation-")
    root = Path(kept.name)
    model = root / "model"
    vocab_size = make_tiny_tokenizer(model)
    # The texts of the indexes are bytes, and bytes below are the tokens that the law likes.
    texts = ["".join(chr(letter) for letter in LETTERS) * 3, "".join(chr(letter) for letter in reversed(LETTERS)) * 2]
    folders = (root / "one", root / "two")
    for folder, text in zip(folders, texts, strict=True):
        build(folder, [text])
    return Assets(
        folder=model,
        vocab_size=vocab_size,
        tokens=Tokens(str(model)),
        indexes=folders,
        cache=root / "cache",
        kept=kept,
    )


class SharedGrammars(CompiledGrammars):
    """Those of one verifier; the engine is loaded, and each of ``GRAMMARS`` compiled, once for all runs."""

    _engine: LLTokenizer | None = None
    _all: ClassVar[dict[StructuredOutputs, LLMatcher]] = {}

    def __init__(self) -> None:
        super().__init__(str(assets().folder), assets().vocab_size, frozenset({EOS}))

    @override
    def _load_tokenizer(self) -> None:
        if SharedGrammars._engine is None:
            super()._load_tokenizer()
            SharedGrammars._engine = self._tokenizer
        self._tokenizer = SharedGrammars._engine

    @override
    def _compile(self, structured: StructuredOutputs) -> LLMatcher:
        if structured not in self._all:
            self._all[structured] = super()._compile(structured)
        return self._all[structured]

    @override
    def _compile_again(self, structured: StructuredOutputs, used_up: LLMatcher) -> LLMatcher:
        self._all.pop(structured, None)
        return super()._compile_again(structured, used_up)
