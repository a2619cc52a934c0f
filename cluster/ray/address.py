"""The Ray that RAY_ADDRESS names: whether it answers and accepts our token."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from services.whole_number import whole_number
from speculation.errors import ConfigurationError

# A harmless call that every Ray answers.
_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"
# Seconds that a Ray has to answer it.
_ANSWERS_S = 3.0


def foreign_ray() -> str | None:
    """The address of a running Ray; None if a local one is to be started."""
    named = os.environ.get("RAY_ADDRESS", "")
    return None if named in ("", "local") else named


def ray_is_here() -> bool:
    """Whether the components will run on this machine, as far as the environment tells."""
    named = foreign_ray()
    return named is None or named == "auto" or named.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")


def check_ray_answers(timeout_s: float = _ANSWERS_S) -> None:
    """Check that the Ray named by the environment answers and accepts our token.

    Raises:
        ConfigurationError: it does not.
    """
    named = foreign_ray()
    if named is None or named == "auto" or named.startswith("ray://"):
        return
    host, _, digits = named.rpartition(":")
    if not host or (port := whole_number(digits, 0, 65535)) is None:
        raise ConfigurationError(
            field="RAY_ADDRESS", value=named, allowed="HOST:PORT of a running Ray; unset it to start a local one"
        )
    try:
        socket.create_connection((host.strip("[]"), port), timeout=timeout_s).close()
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            (
                f"nothing answers there ({getattr(error, 'strerror', None) or error}); start that Ray, or unset "
                "RAY_ADDRESS to start a local one"
            ),
            field="RAY_ADDRESS",
            value=named,
        ) from error
    from services.links.probe import refuses

    if refuses(named, _QUESTION, _token(), timeout_s):
        raise ConfigurationError(
            "that Ray refuses our token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its own",
            field="RAY_ADDRESS",
            value=named,
        )


def ray_answers(address: str) -> bool:
    """Whether the control store of Ray at "host:port" answers."""
    from services.links.probe import answers

    return answers(address, _QUESTION, _token(), _ANSWERS_S)


def _token() -> str | None:
    """The token that Ray itself would send."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
