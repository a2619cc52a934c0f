"""``outrider hash-key`` and ``new-key``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster.process.terminal import stderr
from speculation.errors import OutriderError


def hash_key() -> None:
    """Read an API key without echo and print its hash for server.api_key_hashes."""
    import getpass

    from services.access.key_hash import hash_key

    key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    if len(key) < 16:
        raise OutriderError("an API key needs at least 16 characters")
    typer.echo(hash_key(key))


def new_key(
    name: Annotated[str | None, typer.Option("--id", help="What logs call the key. Default: a part of its hash.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose key it is; keys of one tenant share caches.")] = None,
) -> None:
    """Make a random API key: the key goes to stderr, its record for server.keys_file to stdout (so: >> keys.yaml)."""
    from services.access.key_hash import hash_key, new_key
    from services.access.key_records import KEY_HELP, SCOPES, check_name

    for value, option in ((name, "--id"), (tenant, "--tenant")):
        if value is not None:
            check_name(value, option, "outrider new-key")
    key = new_key()
    stderr().print(f"The key, shown this once:\n{key}", soft_wrap=True, highlight=False)
    lines = [f"- hash: {hash_key(key)}"]
    lines += [f"  {field}: {value}" for field, value in (("id", name), ("tenant", tenant)) if value is not None]
    typer.echo("\n".join((*lines, f"  scopes: [generate, forget]  # of {', '.join(SCOPES)}", f"  # {KEY_HELP}")))
