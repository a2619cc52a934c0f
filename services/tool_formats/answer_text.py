"""Reads what an answer's text is: thoughts, calls of tools, and text that is neither."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, Literal

from services.tool_formats import harmony
from services.tool_formats.catalogue import FORMATS, THOUGHTS
from services.tool_formats.interface import Calls, ToolCall
from services.tool_formats.json_calls import long_id
from services.tool_formats.marks import Marks
from services.tool_formats.raw_json import is_json
from services.tool_formats.tape import MOST_NAME, EndedError, OtherwiseError, Reading, Tape
from services.tool_formats.told_parts import AnswerPart, ToldParts


class AnswerText:
    """Reads one answer, whose text may come in pieces of any size. The parts together are the same for all of them.

    Args:
        marks: how marks stand in the text.
        form: how the model writes calls, a name in ``catalogue.NAMES``; empty: it writes none.
        schemas: of the arguments of each tool, by its name; none: nothing is a call.
        thoughts: how it thinks, a name in ``THOUGHTS``; empty: thoughts are text.
        thinking: the prompt has begun a thought.

    Attributes:
        thinking: what comes next belongs to a thought.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        form: str = "",
        schemas: Mapping[str, Any] | None = None,
        thoughts: str = "",
        thinking: bool = False,
    ) -> None:
        self._marks = marks
        self._form = FORMATS[form](marks) if form in FORMATS and schemas else None
        self._tape = Tape()
        self._calls = Calls(self._tape, schemas or {})
        new_id = long_id if self._form is None else self._form.call_id
        self._told = ToldParts(new_id, trims=self._form is not None or bool(thoughts))
        self._cut = False
        self.thinking = thinking
        self._thoughts = "" if thoughts == harmony.NAME else thoughts
        harmonic = harmony.NAME in (thoughts, form)
        # Known before the first token comes.
        for mark in harmony.MARKS if harmonic else THOUGHTS.get(thoughts, ()):
            marks(mark)
        self._steps: Generator[None, None, None] = self._messages() if harmonic else self._read()

    def push(self, text: str) -> list[AnswerPart]:
        """What more text adds."""
        self._tape.feed(text)
        return self._step()

    def finish(self, *, cut: bool) -> list[AnswerPart]:
        """What the end of the text adds.

        Args:
            cut: the model has not ended it.
        """
        self._cut = cut
        self._tape.end()
        return [*self._step(), *self._told.finish()]

    def _step(self) -> list[AnswerPart]:
        next(self._steps, None)
        self._tell_calls()
        return self._told.take()

    def _read(self) -> Reading[None]:
        if self._thoughts:
            yield from self._thought()
        if self._form is not None and self._form.first:
            yield from self._begins_with_call()
        while not (self._tape.ended and self._tape.empty):
            yield from self._text_until_call()

    def _thought(self) -> Reading[None]:
        """The thought with which an answer begins, if it does."""
        opening, closing = map(self._marks, THOUGHTS[self._thoughts])
        try:
            space = yield from self._tape.space()
            if not self.thinking and not (yield from self._tape.accept(opening)):
                self._tape.put_back(space)
                self._tape.forget()
                return
        except EndedError:
            self._tape.put_back(self._tape.forget())
            return
        self.thinking = True
        yield from self._tape.space()
        self._tape.forget()
        yield from self._stream("thought", (closing,))
        self.thinking = False
        yield from self._tape.space()
        self._tape.forget()

    def _stream(self, kind: Literal["text", "thought"], marks: tuple[str, ...]) -> Reading[str]:
        """Tell all text up to the first of some marks; the mark, which is read; empty: there was none."""
        pattern = re.compile("|".join(map(re.escape, marks)))
        tape = self._tape
        while True:
            hit, ended = tape.find(pattern), tape.ended
            self._told.add(kind, tape.take(hit.start()) if hit else tape.rest(0 if ended else tape.begun(marks)))
            tape.forget()
            if hit is not None:
                tape.take(hit.end())
                return hit[0]
            if ended:
                return ""
            yield

    def _text_until_call(self) -> Reading[None]:
        form = self._form
        if form is not None and not form.first:
            opening = yield from self._stream("text", form.openings)
            if opening:
                yield from self._region(opening)
            return
        while True:
            self._told.add("text", self._tape.rest())
            self._tape.forget()
            if self._tape.ended:
                return
            yield

    def _begins_with_call(self) -> Reading[None]:
        assert self._form is not None
        try:
            yield from self._tape.space()
            for opening in self._form.openings:
                if (yield from self._tape.accept(opening)):
                    yield from self._region(opening)
                    return
        except EndedError:
            pass
        self._told.add("text", self._tape.forget())

    def _region(self, opening: str) -> Reading[None]:
        """What a mark begins: calls, or it is text as well."""
        assert self._form is not None
        calls = self._calls
        try:
            yield from self._form.read(self._tape, calls, opening)
            self._tell_calls()
            self._tape.forget()
        except OtherwiseError:
            self._tell_calls()
            self._told.add("text", calls.unread())
        except EndedError:
            self._tell_calls()
            self._tape.rest()
            self._end_within()

    def _end_within(self) -> None:
        """The text has ended within a call, or behind one."""
        calls = self._calls
        if not self._cut:
            self._told.add("text", calls.unread())
            return
        assert self._form is not None
        begun = self._form.cut(self._tape.forget(), calls)
        calls.begun = None
        if begun is not None:
            self._told.call(begun)

    def _messages(self) -> Reading[None]:
        """Harmony's messages. The prompt has begun the first one, for the assistant."""
        marks = self._marks
        start, body = marks(harmony.START), marks(harmony.MESSAGE)
        ends = tuple(map(marks, (harmony.END, harmony.CALL, harmony.RETURN, harmony.START)))
        while not (self._tape.ended and self._tape.empty):
            try:
                head, mark = yield from self._tape.until(body, *ends, most=MOST_NAME)
                self._tape.forget()
            except EndedError:
                self._tape.rest()
                self._headless(self._tape.forget())
                return
            except OtherwiseError:
                self._told.add("text", self._tape.forget())
                yield from self._stream("text", (start,))
                self._tape.forget()
                continue
            if mark != body:
                self._headless(head)
                continue
            yield from self._message(harmony.message(head, marks), ends)

    def _headless(self, text: str) -> None:
        """Text without a head is text, unless it is the beginning of a head."""
        known = (
            self._marks(harmony.CHANNEL) in text or "assistant".startswith(text.strip()) or text.lstrip().startswith("to=")
        )
        if not known:
            self._told.add("text", text)

    def _message(self, said: harmony.Message, ends: tuple[str, ...]) -> Reading[None]:
        if said.to not in self._calls.schemas:
            if self._told.last == said.kind:
                self._told.add(said.kind, "\n")
            self.thinking = said.kind == "thought"
            yield from self._stream(said.kind, ends)
            self._tape.forget()
            self.thinking = False
            return
        complete = True
        try:
            text, _ = yield from self._tape.until(*ends)
        except EndedError:
            self._tape.rest(self._tape.begun(ends))
            text, complete = self._tape.forget(), not self._cut
            self._tape.rest()
        self._tape.forget()
        if not complete or is_json(text):
            self._told.call(ToolCall(said.to, text.strip()))
        else:
            self._told.add("text", text)

    def _tell_calls(self) -> None:
        for call in self._calls.found:
            self._told.call(call)
        self._calls.found.clear()
