"""What pages tell users to type exists: every command, with every option; every message in the page of troubles."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cli.examples import EXAMPLES
from cli.main import app
from tests.running.documented_commands import documented_commands

ROOT = Path(__file__).parents[3]
PAGES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    # The log and the changelog speak of the past.
    if (ROOT / name).is_file()
    and not name.startswith("docs/log")
    and name != "CHANGELOG.md"
    and documented_commands(ROOT / name)
]
COMMAND = typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """As the command line does, without running anything."""
    command: Any = COMMAND
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{command.name} has no option {word}"


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist_with_their_options(name: str) -> None:
    commands = documented_commands(ROOT / name)
    for words in commands:
        parse([word for word in words if not word.startswith("[")])


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_of_a_commands_help_exist(command: str) -> None:
    for example in EXAMPLES[command]:
        outrider, *words = shlex.split(example.partition(">")[0])
        assert outrider == "outrider" and words[0] == command
        parse(words)


def test_a_wrong_command_is_found() -> None:
    for wrong in (["serv"], ["serve", "--prot", "1"], ["index", "build", "--corpsu", "x"]):
        with pytest.raises(AssertionError):
            parse(wrong)
    assert len(PAGES) >= 8 and sum(len(documented_commands(ROOT / name)) for name in PAGES) >= 60


def test_every_message_among_the_troubles_exists() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) >= 25
    said = (ROOT / "tests/refusals.txt").read_text()
    code = "\n".join(
        path.read_text()
        for package in ("services", "cluster", "speculation", "cli", "retrieval_index", "sdk/outrider")
        for path in (ROOT / package).rglob("*.py")
    )
    assert [row for row in rows if row not in said and row not in code] == []
