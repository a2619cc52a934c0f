"""Processes that render chat templates, so that a template's time and memory are bounded whatever it does.

There are as many as threads that tokenise, since each of these renders one template at a time. They stay alive between
renderings. One that computes for too long is ended; after that, or if one dies, the next rendering starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2

from services.router.template_program import MOST_CHARACTERS, STOPPED, receive, send
from speculation.errors import ResourceExhausted

# Of the processor's time: on a machine that is busy with other work a harmless template takes no more of it.
MOST_SECONDS = 5.0
# By the clock, until it is no use to wait longer for a machine's processors.
_WAIT_S = 60.0
# For a process to start, which takes a tenth of a second on a machine that has nothing else to do.
_START_S = 60.0
# A character is written as up to twelve bytes, in JSON.
_MOST_ANSWER_BYTES = 12 * MOST_CHARACTERS + 1024
# The program sees the same modules as this process, and no file or variable of its user says otherwise.
_PROGRAM = """
import socket, sys
sys.path[:] = {path!r}
from services.router.template_program import serve
serve(socket.socket(fileno={descriptor}))
"""


class StoppedRendering(jinja2.TemplateError):
    """It took too long or too much, and was ended with its process."""


class TemplateProcesses:
    """Renders in processes of its own, which end with this one. May be used by several threads."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()

    def variables(self, source: str) -> frozenset[str]:
        """The names that a template reads and does not define.

        Raises:
            jinja2.TemplateSyntaxError: the source is not a valid template.
            ResourceExhausted: no process can be started; it may be possible later.
        """
        with self._one() as process:
            return process.compile(source)

    def render(self, source: str, given: Mapping[str, Any]) -> str:
        """The text of a template with these variables, which are of JSON's kinds.

        Raises:
            jinja2.TemplateError: the template rejects them, fails on them, or does what the sandbox forbids.
            StoppedRendering: it takes too long.
            ResourceExhausted: as ``variables``, or the machine has no time for it.
        """
        with self._one() as process:
            process.compile(source)
            return process.render(given)

    @contextlib.contextmanager
    def _one(self) -> Iterator[_Process]:
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process()
        try:
            yield process
        finally:
            if not process.ended:
                self._idle.put(process)


class _Process:
    """One process, for one rendering at a time.

    Attributes:
        ended: it can no longer be used.
    """

    def __init__(self) -> None:
        try:
            own, other = socket.socketpair()
            program = _PROGRAM.format(path=sys.path, descriptor=other.fileno())
            with other:
                # Not in the terminal's group: an interrupt is for this process, which ends the other by closing the socket.
                child = subprocess.Popen(
                    [sys.executable, "-I", "-c", program],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    env={name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ},
                )
        except OSError as error:
            raise ResourceExhausted(
                f"no process can be started for the chat template ({error.strerror}); try again"
            ) from error
        self._socket, self._child = own, child
        self._end = weakref.finalize(self, _end, child, own)
        self._started = False
        self._source: str | None = None
        self._variables: frozenset[str] = frozenset()

    @property
    def ended(self) -> bool:
        return not self._end.alive

    def compile(self, source: str) -> frozenset[str]:
        """Make a template the current one; its variables."""
        if source != self._source:
            answer = self._ask({"source": source})
            if "error" in answer:
                self._source = None
                raise jinja2.TemplateSyntaxError(answer["error"], answer["line"] or 1)
            self._source, self._variables = source, frozenset(answer["variables"])
        return self._variables

    def render(self, given: Mapping[str, Any]) -> str:
        """The current template's text."""
        answer = self._ask({"given": given})
        if "error" in answer:
            raise jinja2.TemplateError(answer["error"])
        return str(answer["text"])

    def _wait_for_start(self) -> None:
        """Wait until it has started: that is no time of the template's."""
        self._socket.settimeout(_START_S)
        try:
            self._started = receive(self._socket, 0) is not None
        except OSError:
            self._started = False
        if not self._started:
            self._end()
            raise ResourceExhausted(
                f"the process for the chat template has not started within {_START_S:g} seconds, or has ended; try again"
            )

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if not self._started:
            self._wait_for_start()
        ends_at = time.monotonic() + _WAIT_S
        self._socket.settimeout(_WAIT_S)
        try:
            send(self._socket, json.dumps({**request, "seconds": MOST_SECONDS}).encode())
            self._socket.settimeout(max(0.001, ends_at - time.monotonic()))
            message = receive(self._socket, _MOST_ANSWER_BYTES)
        except TimeoutError:
            self._end()
            raise ResourceExhausted(
                f"the machine is too busy: it has not rendered the chat template within {_WAIT_S:g} seconds; try again"
            ) from None
        except OSError:
            message = None
        if message is None:
            self._end()
            if self._child.returncode == -STOPPED:
                raise StoppedRendering(f"it takes more than {MOST_SECONDS:g} seconds of the processor")
            raise StoppedRendering("it has ended the process that renders it, by the memory that it takes")
        answer: dict[str, Any] = json.loads(message)
        return answer


def _end(child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    child.kill()
    child.wait()
