"""``outrider reload``."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from cli.options import Address, ApiKey, ConfigFile, Set, Tls, TlsRoot, credentials, default_address


def reload(
    folder: Annotated[
        str, typer.Argument(help="Safetensors of the same model: an absolute path at the verifiers (verifier.weights_from).")
    ],
    running: Annotated[
        str,
        typer.Option(
            help="What becomes of answers under way. finish: they end with the old weights; restart: those that are sent as "
            "a whole begin once more with the new ones."
        ),
    ] = "finish",
    within: Annotated[
        float, typer.Option(help="Seconds that answers under way have to end, 1 to 3600; else nothing is replaced.")
    ] = 600.0,
    address: Address = None,
    config: ConfigFile = None,
    settings: Set = None,
    api_key: ApiKey = None,
    tls: Tls = False,
    tls_root: TlsRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replace the weights that a server serves, while it serves: at all its verifiers, or at none."""
    import outrider
    from cluster.settings.config import load

    where = address or default_address(load(config, settings or ()))
    with outrider.Client(where, **credentials(api_key, tls, tls_root)) as client:
        done = client.reload(folder, running=running, within_s=within)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    typer.echo(f"{where} serves the weights in {folder}; answers name them {done.arithmetic}")
    for note in done.notes:
        typer.echo(f"note: {note}")
