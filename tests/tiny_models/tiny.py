"""The tiny model and its tokeniser, by the name under which tests know them."""

from __future__ import annotations

from benchmarks.soak.tiny_model import make_tiny_model, make_tiny_tokenizer

__all__ = ["make_tiny_model", "make_tiny_tokenizer"]
