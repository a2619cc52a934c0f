"""All that the demo measures: in this process, warmed up, with nothing beside it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

import outrider
from cli.demo.lying import LyingLink
from cli.demo.recording import OURS, PLAIN, Pairs, Recording, measure, record
from cluster.models.target import resolve
from cluster.process.local_service import running_in_process
from cluster.process.logs import quiet_libraries
from cluster.process.terminal import telling
from cluster.settings.config import load
from speculation.ports import DraftLink

# One more than a spread needs.
_PAIRS = 3
# Of the answers: all of the first; of the second, enough to be told from noise.
_EDIT_TOKENS, _OPEN_TOKENS = 128, 96
# Of the answer during which a verifier will die.
LONG_TOKENS = 200
EDIT = """Rename the class Stack to Pile and print the whole program again:

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
```"""
OPEN = "Explain in a few sentences why the sky is blue."


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What was measured.

    Attributes:
        edit, open: the edited program, and the one to an open question.
        lied: the first again, while the drafter lies.
        lies: how many drafts were lies.
        long: plain decoding's longer answer to the open question.
    """

    edit: Pairs
    open: Pairs
    lied: Recording
    lies: int
    long: Recording


def measure_all(console: Console) -> Findings:
    """Start the service, measure, and stop it."""
    links: list[LyingLink] = []

    def between(link: DraftLink) -> DraftLink:
        links.append(LyingLink(link))
        return links[0]

    quiet_libraries()
    settings = load(flags=["server.port=0", "server.http_port=null", "logging.level=error"])
    model = resolve(settings.model, settings.cache_dir, say=console.print)
    with (
        telling(console, "Loading the model, and writing two answers three times each, plainly and with drafts"),
        running_in_process(settings, model, between=between) as addresses,
        outrider.Client(addresses.grpc) as client,
    ):
        edit = measure(client, EDIT, _EDIT_TOKENS, _PAIRS)
        open_ = measure(client, OPEN, _OPEN_TOKENS, _PAIRS)
        long = record(client, PLAIN, OPEN, LONG_TOKENS)
        links[0].lies = True
        lied = record(client, OURS, EDIT, _EDIT_TOKENS)
    return Findings(edit=edit, open=open_, lied=lied, lies=links[0].told, long=long)
