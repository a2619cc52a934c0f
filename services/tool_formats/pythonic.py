"""Calls as Python writes them, in a list: ``[look(place="Bern", near=True)]``. Llama 3.2 and 4, LFM2 and others."""

from __future__ import annotations

import json
import re

from services.tool_formats.interface import Calls, ToolCall
from services.tool_formats.json_calls import long_id
from services.tool_formats.tape import MOST_NAME, OtherwiseError, Reading, Tape

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_OUTSIDE = re.compile(r"[\"'()\[\]{}]")
_INSIDE = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_MOST_DEPTH = 64
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_TOKEN = re.compile(
    r"""\s+|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\w.])"""
    r"""|(?P<name>[A-Za-z_][\w.\-]*)|(?P<mark>[\[\](){},:=])""",
    re.DOTALL | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0", "b": "\b", "f": "\f"}
_CHARACTERS = 0x110000


class PythonCalls:
    """Implements ``ToolFormat``.

    Args:
        opening, closing: marks around the list; empty: it is the beginning of an answer.
    """

    def __init__(self, name: str, opening: str = "", closing: str = "") -> None:
        self.name = name
        self.opening, self.closing = opening, closing
        self.openings: tuple[str, ...] = (opening,) if opening else ("[",)
        self.first = not opening
        self.marks: tuple[str, ...] = (opening, closing) if opening else ()

    @property
    def shape(self) -> None:
        """No grammar makes Python of a JSON schema."""

    def read(self, tape: Tape, calls: Calls, opening: str) -> Reading[None]:
        if opening == self.opening:
            yield from tape.space()
            yield from tape.expect("[")
        while True:
            yield from tape.space()
            name, _ = yield from tape.until("(", most=MOST_NAME)
            if not _NAME.fullmatch(name):
                raise OtherwiseError
            calls.begin(name)
            inner = yield from _to_bracket(tape)
            calls.end(arguments_of(inner))
            yield from tape.space()
            if not (yield from tape.accept(",")):
                yield from tape.expect("]")
                break
        if self.closing:
            yield from tape.space()
            yield from tape.expect(self.closing)

    def cut(self, text: str, calls: Calls) -> ToolCall | None:
        # What was written so far is no JSON, and begins none.
        return None if calls.begun is None else ToolCall(calls.begun.name, "{")

    def call_id(self, name: str, index: int) -> str:
        return long_id(name, index)


def _to_bracket(tape: Tape) -> Reading[str]:
    """The text up to the bracket that closes the one before it; the bracket is read, too."""
    found, depth, quote = list[str](), 1, ""
    while depth:
        hit = tape.find(_INSIDE[quote] if quote else _OUTSIDE)
        if hit is None or (hit[0] == "\\" and hit.end() == len(hit.string)):
            found.append(tape.rest(0 if hit is None else 1))
            yield from tape.more()
            continue
        found.append(tape.take(hit.end() + (hit[0] == "\\")))
        if quote:
            quote = "" if hit[0] == quote else quote
        elif hit[0] in "'\"":
            quote = hit[0]
        else:
            depth += 1 if hit[0] in "([{" else -1
        if depth > _MOST_DEPTH:
            raise OtherwiseError
    return "".join(found)[:-1]


def arguments_of(inner: str) -> str:
    """The arguments between a call's brackets, as a JSON object.

    Raises:
        OtherwiseError: they are not all named, or are no values.
    """
    reader = _Values(inner)
    found: list[str] = []
    while reader.next is not None:
        name = reader.take("name")
        reader.take("=")
        found.append(f"{_text(name)}: {reader.value()}")
        if reader.next is not None:
            reader.take(",")
    return "{" + ", ".join(found) + "}"


class _Values:
    """Reads Python's values, and writes them as JSON: numbers as they are."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while found := _TOKEN.match(text, at):
            at = found.end()
            if (kind := found.lastgroup) is not None:
                self._tokens.append((kind if kind != "mark" else found[0], found[0]))
        if at != len(text):
            raise OtherwiseError
        self._tokens.reverse()

    @property
    def next(self) -> str | None:
        """The kind of the next token; None: there is none."""
        return self._tokens[-1][0] if self._tokens else None

    def take(self, kind: str) -> str:
        """The next token.

        Raises:
            OtherwiseError: it is of another kind.
        """
        if self.next != kind:
            raise OtherwiseError
        return self._tokens.pop()[1]

    def value(self) -> str:
        """The next value. Its brackets are not nested too deeply: the text's were counted."""
        match self.next:
            case "number":
                return self.take("number")
            case "text":
                return _text(_ESCAPE.sub(_unescaped, self.take("text")[1:-1]))
            case "name":
                # Templates leave out the quotes of texts.
                name = self.take("name")
                return _CONSTANTS.get(name, _text(name))
            case "[" | "(":
                end = {"[": "]", "(": ")"}[self.take(self.next)]
                return f"[{', '.join(self._until(end))}]"
            case "{":
                self.take("{")
                return "{" + ", ".join(self._until("}", named=True)) + "}"
        raise OtherwiseError

    def _until(self, end: str, *, named: bool = False) -> list[str]:
        found: list[str] = []
        while self.next != end:
            before = ""
            if named:
                before = _text(_ESCAPE.sub(_unescaped, self.take("text")[1:-1])) + ": "
                self.take(":")
            found.append(before + self.value())
            if self.next != end:
                self.take(",")
        self.take(end)
        return found


def _unescaped(found: re.Match[str]) -> str:
    code, letter = found[1] or found[2] or found[3], found[4]
    if code is not None:
        # Half of a surrogate pair is no character.
        valid = int(code, 16) < _CHARACTERS and not 0xD800 <= int(code, 16) <= 0xDFFF
        return chr(int(code, 16)) if valid else found[0]
    return _ESCAPED.get(letter, found[0])


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
