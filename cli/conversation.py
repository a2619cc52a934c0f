"""``outrider chat`` without a message: a conversation, line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from cli.printed_answer import print_answer
from cluster.process.terminal import explain, stderr
from services.whole_number import whole_number
from speculation.limits import MAX_UINT64

if TYPE_CHECKING:
    import outrider
    from outrider.requests import Message, Options

_HELP = """/strategy NAME  draft in another way; the words stay the same
/seed N         draw with this seed; /seed alone draws a new one for each answer
/new            forget the conversation
/quit           end it, as Ctrl-D does; Ctrl-C ends an answer"""


class Conversation:
    """What has been said, and how the next answer is asked for.

    Args:
        system: the messages that every conversation begins with.
        options: of every request; commands change them.
        sources: show who guessed what.
        read: the next line of the user; raises EOFError at the end.
    """

    def __init__(
        self,
        client: outrider.Client,
        system: list[Message],
        options: Options,
        read: Callable[[], str] = lambda: input("> " if sys.stdin.isatty() else ""),
        *,
        sources: bool = False,
    ) -> None:
        self._client = client
        self._system = system
        self._said: list[Message] = []
        self._options = options
        self._read = read
        self._sources = sources

    def run(self) -> None:
        """Answer until the user has had enough. A request that fails is said, and the conversation goes on."""
        if sys.stdin.isatty():
            stderr().print("[dim]A conversation; /help lists what else there is.[/dim]")
        while True:
            try:
                line = self._read().strip()
            except EOFError:
                return
            if line == "/quit":
                return
            if line.startswith("/"):
                stderr().print(self._command(*line[1:].split(maxsplit=1)), style="dim", markup=False)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        asked: Message = {"role": "user", "content": line}
        try:
            stream = self._client.stream(messages=[*self._system, *self._said, asked], **self._options)
            result = print_answer(stream, False, sources=self._sources)
        except KeyboardInterrupt:
            # It ends the answer, and the conversation only at the prompt.
            sys.stdout.write("\n")
            stderr().print("stopped: this question and its answer are forgotten", style="dim")
            return
        except Exception as error:
            if (known := explain(error)) is None:
                raise
            stderr().print(known[0], style="red", markup=False)
            return
        self._said += [asked, {"role": "assistant", "content": result.text}]

    def _command(self, name: str = "", value: str = "") -> str:
        """Do what a line that begins with a slash asks for; returns what to say."""
        if name == "strategy" and value:
            self._options["strategy"] = cast("outrider.Strategy", value)
            return f"strategy: {value}"
        if name == "seed" and (seed := whole_number(value, 0, MAX_UINT64)) is not None:
            self._options["seed"] = seed
            return f"seed: {value}"
        if name == "seed" and not value:
            self._options.pop("seed", None)
            return "seed: a new one for each answer"
        if name == "new" and not value:
            self._said.clear()
            return "a new conversation"
        return _HELP
