"""Paths that are not served here, and what to use instead."""

from __future__ import annotations

_TEXT = "Outrider generates text only"
_BESIDE = {
    "embeddings": "run a server of embedding models beside it",
    "reranking": "run a server of reranking models beside it, or ask a model of text for a verdict",
    "audio": "run a server of speech models beside it",
    "images": "run a server of image models beside it",
    "moderations": "ask a guard model over /v1/chat/completions",
}
_PATHS = {
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/moderations": "moderations",
}
# Only asked for where the setting has not put it there.
_METRICS = "there is no /metrics at this port: set server.metrics: true, or ask the ops port (server.ops_port)"
_FOLDERS = {"/v1/audio/": "audio", "/v1/images/": "images"}


def instead_of(path: str) -> str | None:
    """What to say of a path; None: it is none of these."""
    if path == "/metrics":
        return _METRICS
    what = _PATHS.get(path) or next((what for folder, what in _FOLDERS.items() if path.startswith(folder)), None)
    return None if what is None else f"there is no {path}: {_TEXT}; for {what}, {_BESIDE[what]}"
