"""The Ray that the environment names, if it names one: whether it answers, and whether it takes our token."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from speculation.errors import ConfigurationError

# A question that every Ray answers, and that harms nothing.
_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def foreign_ray() -> str | None:
    """Its address; None where a Ray of our own is to be started."""
    named = os.environ.get("RAY_ADDRESS", "")
    return None if named in ("", "local") else named


def ray_is_here() -> bool:
    """Whether components will run on this machine, as far as the environment says."""
    named = foreign_ray()
    return named is None or named == "auto" or named.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")


def check_ray_answers(timeout_s: float = 3.0) -> None:
    """Check that there is a Ray where the environment says so, and that it lets us in.

    Raises:
        ConfigurationError: there is none, or it does not.
    """
    named = foreign_ray()
    if named is None or named == "auto" or named.startswith("ray://"):
        return
    host, _, port = named.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"RAY_ADDRESS is {named}: must be HOST:PORT of a running Ray (unset: one of our own)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigurationError(
            f"RAY_ADDRESS is {named}: nothing answers there ({getattr(error, 'strerror', None) or error}); "
            "start that Ray, or unset RAY_ADDRESS for one of our own"
        ) from error
    from services.links.probe import refuses

    if refuses(named, _QUESTION, _token(), timeout_s):
        raise ConfigurationError(
            f"RAY_ADDRESS is {named}: that Ray refuses our token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its own"
        )


def _token() -> str | None:
    """What Ray itself would send."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
