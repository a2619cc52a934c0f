"""Tries clients against a server and writes docs/clients.md. See the package."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.clients.judging import FEATURES, judge
from tests.clients.recorder import recording
from tests.clients.scripts import Script, environment, scripts
from tests.clients.servers import Server, served
from tests.clients.table import write

# Seconds that a client may take for all of its features, its installation included.
_PATIENCE_S = 900
Found = dict[str, str | None]


def main() -> int:
    known = {script.name: script for script in scripts()}
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"one of {', '.join(known)}; none: all")
    parser.add_argument("--cache", type=Path, default=Path(".cache/clients"), help="where environments and models are")
    parser.add_argument("--only-try", action="store_true", help="leave docs/clients.md as it is")
    asked = parser.parse_args()
    if unknown := set(asked.clients) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    wanted = [known[name] for name in asked.clients or known]
    results: dict[Script, Found] = {script: {} for script in wanted}
    cache = asked.cache.absolute()
    cache.mkdir(parents=True, exist_ok=True)
    for with_tools in (False, True):
        with served(cache, with_tools=with_tools) as server:
            for script in wanted:
                _merge(results[script], _try(script, server, cache))
    if not asked.only_try:
        write(results)
    unexplained = [
        f"{script.name}, {feature}: {why}"
        for script, found in results.items()
        for feature, why in found.items()
        if why is not None and feature not in script.notes
    ]
    print(f"\n{len(results)} clients; failures that no note explains: {len(unexplained)}")
    print("".join(f"  {line}\n" for line in unexplained), end="")
    return 1 if unexplained else 0


def _try(script: Script, server: Server, cache: Path) -> Found:
    variables = environment(cache)
    with recording(server.url) as recorder:
        variables |= {
            "CLIENT_URL": recorder.url,
            "CLIENT_MODEL": server.model,
            "CLIENT_FOLDER": str(cache / "folders" / script.name),
        }
        told = _told(script, variables, cache)
        tried = [feature for feature in FEATURES if feature in told or feature in recorder.asked] or list(FEATURES)
        found = {feature: judge(server.url, feature, told.get(feature), recorder.asked[feature]) for feature in tried}
    shown = " ".join(f"{feature}={why or 'yes'}" for feature, why in found.items())
    print(f"{script.name} on {server.model}: {shown}", flush=True)
    return found


def _told(script: Script, variables: dict[str, str], cache: Path) -> dict[str, dict[str, Any]]:
    """What a client printed, by feature; what it complains of is in a file of its name."""
    Path(variables["CLIENT_FOLDER"]).mkdir(parents=True, exist_ok=True)
    with (cache / f"{script.name}.log").open("w") as log:
        try:
            command = script.command(cache)
            done = subprocess.run(
                command,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=_PATIENCE_S,
                cwd=variables["CLIENT_FOLDER"],
            )
            printed = done.stdout
        except subprocess.TimeoutExpired as late:
            printed = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"feature"')]
    return {line["feature"]: line for line in lines}


def _merge(found: Found, more: Found) -> None:
    """What holds on all servers."""
    for feature, why in more.items():
        found[feature] = found.get(feature) or why


if __name__ == "__main__":
    sys.exit(main())
