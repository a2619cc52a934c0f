"""Options of the commands that ask a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.settings.config import API_KEY_VARIABLE
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.settings.config import Settings

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One setting, such as verifier.dtype=bfloat16. Repeatable.")]
Address = Annotated[str | None, typer.Option("--address", help="A running server, host:port. Default: 127.0.0.1:50051.")]
Tls = Annotated[bool, typer.Option("--tls", help="The server speaks TLS.")]
TlsRoot = Annotated[Path | None, typer.Option("--tls-root", help="PEM file that replaces the system's root certificates.")]
ApiKey = Annotated[str | None, typer.Option(envvar=API_KEY_VARIABLE, help="API key for the server.")]


def credentials(api_key: str | None, tls: bool, root: Path | None) -> dict[str, Any]:
    """What ``outrider.Client`` is given to be let in.

    Raises:
        ConfigurationError: there is no such file.
    """
    if root is not None and not root.is_file():
        raise ConfigurationError("no such file", field="--tls-root", value=root)
    pem = root.read_bytes() if root is not None else None
    return {"api_key": api_key, "tls": tls or root is not None, "root_certificates": pem}


def default_address(settings: Settings) -> str:
    """Where the server of these settings is."""
    return f"{settings.server.host}:{settings.server.port}"
