"""docs/clients.md: which client gets what, from which version, as the last run of each has found it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from tests.clients.judging import FEATURES
from tests.clients.scripts import BEFORE, Script

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_ROW = re.compile(r"^\| `([a-z_0-9]+)` \|")
_NOTE = re.compile(r"^- `([a-z_0-9]+)`, ")
_HEAD = f"""# Clients

For those who use other people's clients: which are tried against a running Outrider, each in an environment of its own with pinned packages.

    make test-clients                           # all of them: half an hour at first, most of it downloads
    python -m tests.clients openai anthropic    # some of them

Made by that command, which keeps the rows of clients that it does not try. It starts two servers itself: the default model, whose chat template knows no tools, and the
same weights under a template that does. Requests are greedy, or asked
again with the seed of the first answer. A cell is "yes" where, on both, the client's user gets

- **default**: the text that plain HTTP gives for what the client sent,
- **stream**: that text in several pieces,
- **tools**: a call of a function with the arguments that plain HTTP gives,
- **structured**: an object that satisfies the schema, the one that plain HTTP gives.

"no" and "—" (there is no such thing, or it was not tried) are explained below the table. The files are in `tests/clients/`. They pin the client, and of what it needs in turn the
newest releases before {BEFORE} are taken; clients for Node are the newest that run on Node 20. `vllm bench serve` and guidellm need a PyTorch: the one for CPUs where `UV_FIND_LINKS` has it,
else PyPI's with gigabytes of CUDA. `vllm bench serve` runs without the packages that vLLM needs on GPUs; [Metrics](how-to/metrics.md) says how it shows acceptance.

"""


def write(results: Mapping[Script, Mapping[str, str | None]]) -> None:
    """Write the page.

    Args:
        results: by client and feature why it failed; None: it did not. A feature that is missing is not there.
    """
    rows, notes = _kept()
    for script, found in results.items():
        rows[script.name] = _row(script, found)
        notes[script.name] = [
            f"- `{script.name}`, {each}: {_why(script, each, found)}" for each in FEATURES if _why(script, each, found)
        ]
    head = f"| Client | Package | Speaks | {' | '.join(FEATURES)} | Tried |\n|-|-|-|{'-|' * len(FEATURES)}-|\n"
    told = [note for name in sorted(notes) for note in notes[name]]
    below = "\n## What is not there, and why\n\n" + "\n".join(told) + "\n" if told else ""
    PAGE.write_text(_HEAD + head + "".join(f"{rows[name]}\n" for name in sorted(rows)) + below)


def rows() -> dict[str, str]:
    """The page's rows by client."""
    return _kept()[0]


def _kept() -> tuple[dict[str, str], dict[str, list[str]]]:
    rows: dict[str, str] = {}
    notes: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines() if PAGE.is_file() else []:
        if found := _ROW.match(line):
            rows[found[1]] = line
        elif found := _NOTE.match(line):
            notes.setdefault(found[1], []).append(line)
    return rows, notes


def package_of(script: Script) -> str:
    """As a row names it."""
    return f"{script.title} {script.version}"


def _row(script: Script, found: Mapping[str, str | None]) -> str:
    cells = ["—" if each not in found else "yes" if found[each] is None else "no" for each in FEATURES]
    return f"| `{script.name}` | {package_of(script)} | {script.doors} | {' | '.join(cells)} | {date.today().isoformat()} |"


def _why(script: Script, feature: str, found: Mapping[str, str | None]) -> str | None:
    return script.notes.get(feature) if feature not in found or found[feature] is not None else None
