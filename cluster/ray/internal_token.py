"""The token with which components recognise each other."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

from cluster.settings.config import Settings
from services.model_files.folder import reading
from speculation.errors import ConfigurationError

_SHORTEST = 16


def with_token(settings: Settings) -> Settings:
    """``settings`` with a token: the named one, that of the named file, or one of our own.

    On a Ray that asks for a token ours follows from Ray's and from the service's name, so that the same service deployed
    again has the same; elsewhere it is drawn.

    Raises:
        ConfigurationError: both are named, or the file cannot be read or holds too little.
    """
    file, token = settings.internal_token_file, settings.internal_token
    if file is not None:
        if token is not None:
            raise ConfigurationError("set one of the two", field="internal_token and internal_token_file")
        with reading(f"read internal_token_file {file}", about=file):
            token = file.read_text(encoding="utf-8").strip()
        if len(token) < _SHORTEST:
            raise ConfigurationError(
                f"holds {len(token)} characters; must hold at least {_SHORTEST}", field="internal_token_file", value=file
            )
    if token is None:
        shared = os.environ.get("RAY_AUTH_TOKEN", "")
        named = f"outrider internal token of {settings.cluster.name}".encode()
        token = hmac.digest(shared.encode(), named, hashlib.sha256).hex() if shared else secrets.token_hex(32)
    return settings.model_copy(update={"internal_token": token, "internal_token_file": None})
