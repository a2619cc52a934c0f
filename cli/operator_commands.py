"""``outrider top``, ``outrider doctor``, ``outrider leave`` and ``outrider reload``."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from cli.options import Address, ApiKey, ConfigFile, Set, Tls, TlsRoot, credentials, default_address, settings_of
from cluster.process.terminal import stderr
from speculation.errors import OutriderError


def top(
    url: Annotated[
        list[str] | None,
        typer.Option(help="Where a server's numbers are. Repeatable: they are added up. Default: its ops port."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, after one interval, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, after one interval, and end.")] = False,
    config: ConfigFile = None,
    settings: Set = None,
) -> None:
    """Show what a running server does now: load, speed, what drafting brings by strategy and source, and troubles."""
    from cli.top import show_top
    from speculation.errors import ConfigurationError

    if not url:
        server = settings_of(config, settings).server
        if not server.ops:
            raise ConfigurationError("name the server's numbers with --url", field="server.ops_port", value=server.ops_port)
        url = [f"http://{server.ops_host}:{server.ops}/metrics"]
    show_top(url, interval_s=interval, once=once, as_json=as_json)


def doctor(
    config: ConfigFile = None,
    model: Annotated[str | None, typer.Option("--model", help="Hugging Face name, folder or .gguf file.")] = None,
    settings: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of findings.")] = False,
) -> None:
    """Check what this machine lacks for `outrider serve`. Exit code 1 if something would not work."""
    from cli.doctor import examine

    if not examine(settings_of(config, settings, model=model), as_json=as_json):
        raise typer.Exit(1)


def leave(
    name: Annotated[str, typer.Option(help="Of the service on Ray (cluster.name).")] = "outrider",
    node_ip: Annotated[
        str | None, typer.Option(envvar="POD_IP", help="Address of this node, where the machine has several.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Most seconds to wait. Default: as long as answers take.")
    ] = None,
) -> None:
    """Drain this Ray node's routers before the node is stopped: no new calls, and wait for the open answers."""
    from cluster.process.terminal import stderr
    from cluster.ray.leaving import leave as end_routers

    try:
        ended = end_routers(name, node_ip, timeout)
    except TimeoutError:
        stderr().print(f"answers are still open after {timeout:g} s")
        raise typer.Exit(1) from None
    stderr().print(f"{ended} router{'' if ended == 1 else 's'} of this node {'has' if ended == 1 else 'have'} ended")


def hash_key() -> None:
    """Read an API key without echo and print its hash for server.api_key_hashes."""
    import getpass

    from services.access.key_records import hash_key

    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if len(key) < 16:
        raise OutriderError("an API key needs at least 16 characters")
    typer.echo(hash_key(key))


def new_key(
    name: Annotated[str | None, typer.Option("--id", help="What logs call the key. Default: a part of its hash.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose key it is; keys of one tenant share caches.")] = None,
) -> None:
    """Make a random API key: the key goes to stderr, its record for server.keys_file to stdout (so: >> keys.yaml)."""
    from services.access.key_records import KEY_HELP, SCOPES, USUAL_SCOPES, check_name, hash_key, new_key

    for value, option in ((name, "--id"), (tenant, "--tenant")):
        if value is not None:
            check_name(value, option, "outrider new-key")
    key = new_key()
    stderr().print(f"The key, shown this once:\n{key}", soft_wrap=True, highlight=False)
    lines = [f"- hash: {hash_key(key)}"]
    lines += [f"  {field}: {value}" for field, value in (("id", name), ("tenant", tenant)) if value is not None]
    lines.append(f"  scopes: [{', '.join(USUAL_SCOPES)}]  # of {', '.join(SCOPES)}")
    typer.echo("\n".join((*lines, f"  # {KEY_HELP}")))


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

    where = address or default_address(settings_of(config, settings))
    with outrider.Client(where, **credentials(api_key, tls, tls_root)) as client:
        done = client.reload(folder, running=running, within_s=within)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
        return
    typer.echo(f"{where} serves the weights in {folder}; answers name them {done.arithmetic}")
    for note in done.notes:
        typer.echo(f"note: {note}")


COMMANDS = (top, new_key, hash_key, leave, reload)
