"""``system_fingerprint``: the same for servers that answer alike."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata

from services.client_api import ModelCard


@cache
def server_version() -> str:
    """The version of Outrider."""
    return metadata.version("outrider-server")


def fingerprint(card: ModelCard) -> str:
    """A short hash of the server's version and of everything that it says of the model."""
    told = (server_version(), card.name, card.max_model_len, card.vocab_size, card.bit_exact, card.defaults, card.processors)
    return "fp_" + hashlib.sha256(repr(told).encode()).hexdigest()[:12]
