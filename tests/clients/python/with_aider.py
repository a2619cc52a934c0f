# /// script
# dependencies = ["aider-chat==0.86.2"]
# [tool.outrider]
# tools = "It asks for none: edits are text."
# structured = "It asks for none: edits are text."
# ///
"""aider, over chat completions."""

import os
import subprocess
import sys
from pathlib import Path

from asked import KEY, MODEL, QUESTION, run


def _pieces(url, *options):
    """The answer in the pieces in which the command prints it."""
    program = str(Path(sys.executable).with_name("aider"))
    silent = ("pretty", "git", "check-update", "show-model-warnings", "show-release-notes")
    quiet = [*(f"--no-{name}" for name in silent), "--analytics-disable", "--yes-always"]
    where = ["--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", KEY, "--map-tokens", "0"]
    folder = os.environ["CLIENT_FOLDER"]
    histories = [f"--{name}-history-file={folder}/{name}" for name in ("chat", "input")]
    command = [program, *quiet, *where, *histories, "--chat-mode", "ask", *options, "--message", QUESTION]
    # It breaks lines at the width of the terminal.
    variables = {**os.environ, "COLUMNS": "10000", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, env=variables)
    pieces = []
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        pieces.append(piece.decode())
    assert process.wait() == 0
    # Before the answer it tells what it does, and behind it what that cost.
    printed = "".join(pieces)
    begins = printed.index("Repo-map: disabled") + len("Repo-map: disabled")
    begins += len(printed[begins:]) - len(printed[begins:].lstrip())
    ends = len(printed[: printed.index("\nTokens: ")].rstrip())
    ahead = [len("".join(pieces[:index])) for index in range(len(pieces))]
    return [piece[max(0, begins - at) : max(0, ends - at)] for at, piece in zip(ahead, pieces, strict=True)]


def default(url):
    return "".join(_pieces(url, "--no-stream"))


def stream(url):
    return _pieces(url, "--stream")


run(default, stream)
