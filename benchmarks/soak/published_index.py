"""A small retrieval index for a model, published in a Redis of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.soak.free_port import free_port
from benchmarks.soak.mortal_redis import MortalRedis, mortal_redis
from cluster.models.target import ResolvedModel
from retrieval_index.builder import BuildConfig, ScoringTarget, build_index
from retrieval_index.corpus import Document
from retrieval_index.perplexity import ModelScorer
from retrieval_index.store import IndexStore
from services.model_files.folder import read_json, text_config, tokenizer_digest
from services.router.tokens import Tokens


@contextmanager
def published_index(model: ResolvedModel, texts: Sequence[str], folder: Path) -> Iterator[MortalRedis]:
    """Redis with an index of these texts as its live version "default"; both have their files in ``folder``."""
    with mortal_redis(free_port(), folder / "redis") as redis:
        publish(redis.url, model, texts, folder / "index")
        yield redis


def publish(url: str, model: ResolvedModel, texts: Sequence[str], folder: Path) -> str:
    """Build an index in ``folder`` and make it the live version at this Redis; returns which one it is."""
    tokens = Tokens(str(model.path))
    config = BuildConfig(keep=1.0, depth=8, score_tokens=64)
    documents = [
        Document(text=text, digest=hashlib.sha256(text.encode()).hexdigest(), origin=f"text {number}")
        for number, text in enumerate(texts)
    ]
    vocab_size = int(text_config(read_json(model.path / "config.json"))["vocab_size"])
    target = ScoringTarget(name=model.name, tokenizer_sha256=tokenizer_digest(model.path), vocab_size=vocab_size)
    manifest = build_index(documents, target, tokens.encode, lambda: ModelScorer(model.path), folder, config)
    with IndexStore(url, "default") as store:
        store.publish(folder)
    return manifest.version
