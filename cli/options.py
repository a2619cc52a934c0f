"""Options of the commands that ask a running server, and what those that ask for an answer may say of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.settings.config import API_KEY_VARIABLE, load
from speculation.errors import ConfigurationError
from speculation.sources import STRATEGIES

if TYPE_CHECKING:
    from cluster.settings.config import Settings

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="One setting, such as verifier.dtype=bfloat16. Repeatable.")]
Address = Annotated[str | None, typer.Option("--address", help="A running server, host:port. Default: 127.0.0.1:50051.")]
Tls = Annotated[bool, typer.Option("--tls", help="The server speaks TLS.")]
TlsRoot = Annotated[Path | None, typer.Option("--tls-root", help="PEM file that replaces the system's root certificates.")]
ApiKey = Annotated[str | None, typer.Option(envvar=API_KEY_VARIABLE, help="API key for the server.")]
Strategy = Annotated[str | None, typer.Option(help=f"One of {', '.join(STRATEGIES)}. Default: the server's.")]
DraftSources = Annotated[
    str | None,
    typer.Option(
        "--draft-sources",
        help="In place of a strategy: comma-separated sources that draft one tree, as lookahead,rest.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate. Default: the model's, or 256.")]
Temperature = Annotated[
    float | None, typer.Option(help="0: always the likeliest token; larger is more random. Default: the model's, or 0.")
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same answer. Default: a random one, printed with --json.")
]
TopP = Annotated[float | None, typer.Option(help="Keep only the likeliest tokens whose probabilities add up to this.")]
TopK = Annotated[int | None, typer.Option(help="Keep only this many of the likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text. Repeatable.")]
Nodes = Annotated[int | None, typer.Option(help="Most drafted tokens to check in one pass.")]
EffortName = Annotated[
    str | None,
    typer.Option(
        "--effort",
        help="paper: each step waits for a draft and checks all of it; measured: as far as that pays. Default: measured for "
        "auto and blend, paper for other strategies.",
    ),
]
DrafterName = Annotated[
    str | None, typer.Option("--drafter", help="Name of the model that drafts, of those that the server has for you.")
]
Sources = Annotated[
    bool,
    typer.Option("--sources", help="Show who guessed which part of the answer: by colour on a terminal, and in numbers."),
]


def settings_of(config: Path | None, flags: Sequence[str] | None, **named: object) -> Settings:
    """The settings of a file and of ``--set``, with those that options of their own name, where they are given."""
    return load(config, [*(flags or ()), *(f"{name}={value}" for name, value in named.items() if value is not None)])


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
