"""The command lines in the code blocks of Markdown pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_FENCED = re.compile(r"^```(?:bash|console|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    (?:\.venv/bin/)?(outrider .*)$", re.MULTILINE)


def documented_commands(page: Path) -> list[list[str]]:
    """The arguments of every `outrider` command of a page, without comments, redirections and what is piped on."""
    text = page.read_text()
    lines = [line for block in _FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += _INDENTED.findall(_FENCED.sub("", text))
    found = []
    for line in lines:
        for part in re.split(r"&&|\|(?![^{]*})", line):
            words = _words(part)
            while words and words[0] != "outrider":
                words = words[1:] if "=" in words[0] or words[0] in ("export", "$") else []
            if words:
                found.append(words[1:])
    return found


def _words(part: str) -> list[str]:
    words = shlex.split(part, comments=True)
    end = next((at for at, word in enumerate(words) if word.startswith((">", "2>"))), len(words))
    return words[:end]
