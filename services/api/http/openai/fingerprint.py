"""``system_fingerprint``: the same for servers that answer alike."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata

from services.api.messages import ModelCard


@cache
def server_version() -> str:
    """The version of Outrider."""
    return metadata.version("outrider-server")


def fingerprint(card: ModelCard) -> str:
    """A short hash of the server's version and of everything that decides the model's tokens."""
    limits = (card.max_model_len, card.vocab_size)
    told = (server_version(), card.name, *limits, card.bit_exact, card.defaults, card.processors, card.arithmetic)
    return "fp_" + hashlib.sha256(repr(told).encode()).hexdigest()[:12]
