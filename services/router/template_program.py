"""Compiles and renders chat templates in a process of their own, which ``services.router.template_process`` starts.

Templates come with models from elsewhere and are foreign programs. jinja2's sandbox keeps them away from everything that is
not theirs. The process bounds what they use, whatever they do: the system ends it once it has computed for too long, and
gives it no more memory than its limit. This file imports nothing else of Outrider, so that the process starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

# Characters of a rendered text; twice what a request can hold.
MOST_CHARACTERS = 8 << 20
MOST_BYTES = 512 << 20
# Ends a process that has computed for too long, by the processor's time: other work on the machine costs nothing.
STOPPED = signal.SIGPROF
_LENGTH_BYTES = 4


def serve(connection: socket.socket) -> None:
    """Say by an empty message that it has started, then answer requests until the other end closes the connection.

    A request is ``{"source": ...}``, which is compiled and becomes the current template, or ``{"given": ...}``, its
    variables. ``seconds`` beside it are those that the processor may take.
    The answer is ``{"variables": [...]}``, ``{"text": ...}``, or ``{"error": ..., "line": ...}``.
    """
    template: jinja2.Template | None = None
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    # Whoever started this process may have had it otherwise.
    signal.signal(STOPPED, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [STOPPED])
    send(connection, b"")
    while (message := receive(connection, None)) is not None:
        asked = json.loads(message)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        answer: dict[str, Any]
        try:
            if "source" in asked:
                template, variables = compiled(asked["source"])
                answer = {"variables": sorted(variables)}
            else:
                assert template is not None
                answer = {"text": rendered(template, asked["given"])}
        except Exception as error:  # a template is a program: it may divide by zero, or call itself for ever
            answer = {"error": _said_by(error), "line": getattr(error, "lineno", None)}
        told = json.dumps(answer).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, told)


def compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    """A template, and the names that it reads and does not define, except those of functions that all templates have."""
    environment = _environment()
    found = meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), found - environment.globals.keys()


def rendered(template: jinja2.Template, given: Mapping[str, Any]) -> str:
    """The template's text."""
    pieces, length = [], 0
    for piece in template.generate(given):
        length += len(piece)
        if length > MOST_CHARACTERS:
            raise SecurityError(f"it makes a text that is too long (more than {MOST_CHARACTERS} characters)")
        pieces.append(piece)
    return "".join(pieces)


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message behind its length."""
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "big") + message)


def receive(connection: socket.socket, most: int | None) -> bytes | None:
    """The next message; None: the other end has closed the connection, or sends more than ``most`` bytes."""
    head = _exactly(connection, _LENGTH_BYTES)
    length = 0 if head is None else int.from_bytes(head, "big")
    return None if head is None or (most is not None and length > most) else _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    found = bytearray()
    while len(found) < length:
        if not (piece := connection.recv(min(length - len(found), 1 << 20))):
            return None
        found += piece
    return bytes(found)


def _said_by(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than {MOST_BYTES >> 20} MiB of memory"
    # A template's own refusals are told in its words.
    told = error.message if isinstance(error, jinja2.TemplateError) else None
    return told or f"{type(error).__name__}: {error}"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _PublicNamespace}
    )
    return environment


class _GenerationBlocks(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only outputs its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    @override
    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # transformers makes it a call block, too, which has a scope of its own.
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> Any:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, this one does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Dict:
    """``dict`` without the attributes of a class, through which a template could leave the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _PublicNamespace(Namespace):
    """A namespace that rejects names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja2
        self, rest = args[0], args[1:]
        given = dict(*rest, **kwargs)
        for name in given:
            _check_public(name)
        Namespace.__init__(self, given)

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")
