"""What an answer says: thoughts, text and calls of tools, in whichever form the model writes. All endpoints read it here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.api.http.openai.choice_text import Piece, TextToken
from services.api.http.openai.forced_calls import ForcedCalls, ListedCalls, NamedCall
from services.api.http.openai.preparing import Prepared
from services.api.http.openai.request import Asked
from services.api.messages import Completion
from services.api.model_card import ModelCard
from services.tool_formats.answer_text import AnswerText
from services.tool_formats.catalogue import FORMATS
from services.tool_formats.json_calls import long_id
from services.tool_formats.marks import Marks
from services.tool_formats.told_parts import AnswerPart
from speculation.types import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What a piece of text adds to a message: text, a part of a thought, or a part of a call.

    A call is begun by a delta with its id and name; further ones add to its arguments, until another call begins, text
    comes, or the answer ends.

    Attributes:
        call: the call's place among the answer's calls; None: text, or a thought.
        name: the function, in the first delta of a call.
        text: of the answer, of the thought, or of the arguments.
        thought: it belongs to a thought.
    """

    text: str = ""
    call: int | None = None
    id: str = ""
    name: str = ""
    thought: bool = False

    def as_json(self) -> dict[str, Any]:
        """As in ``choices[].delta``."""
        if self.call is None:
            return {"reasoning_content" if self.thought else "content": self.text}
        called: dict[str, Any] = {"index": self.call, "function": {"arguments": self.text}}
        if self.name:
            called |= {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}
        return {"tool_calls": [called]}


class AnswerReader:
    """Reads one choice. The deltas of all pieces together are the same however its text is cut.

    Args:
        thinking: the prompt has begun a thought.

    Attributes:
        calls: how many have been found so far.
        thought_tokens: how many tokens belong to thoughts so far.
    """

    def __init__(self, asked: Asked, card: ModelCard, *, thinking: bool = False) -> None:
        tools = asked.tools
        free = tools is not None and tools.mode == "auto"
        self._marks = Marks(card.special_tokens)
        self._text = AnswerText(
            self._marks,
            form=card.tool_format if free else "",
            schemas=tools.callable if tools is not None and free else None,
            thoughts=card.thoughts,
            thinking=thinking,
        )
        form = FORMATS.get(card.tool_format)
        new_id = long_id if form is None else form(self._marks).call_id
        self._forced: ForcedCalls | None = None
        if tools is not None and not free:
            self._forced = NamedCall(tools.called, new_id) if tools.mode == "named" else ListedCalls(new_id)
        self._special = frozenset(card.special_tokens.values())
        self._named = not asked.skip_special_tokens
        self._thoughts_wanted = asked.thoughts
        self.calls = 0
        self.thought_tokens = 0

    def push(self, piece: Piece) -> list[Delta]:
        """What a piece adds."""
        found: list[AnswerPart] = []
        length = 0
        for token in piece.tokens:
            length += len(token.text)
            thinking = self._text.thinking
            found += self._text.push(self._as_marked(token))
            self.thought_tokens += thinking or self._text.thinking
        return self._deltas([*found, *self._text.push(piece.text[length:])])

    def finish(self, end: Completion) -> list[Delta]:
        """What the end of the answer adds."""
        cut = end.finish_reason is not FinishReason.STOP or isinstance(end.stop, str)
        found = self._deltas(self._text.finish(cut=cut))
        return found if self._forced is None else [*found, *self._counted(self._forced.finish())]

    def _as_marked(self, token: TextToken) -> str:
        if not token.shown or token.id not in self._special:
            return token.text
        # A mark is a token, not text that looks like one.
        return self._marks.letter(token.id) or token.text

    def _deltas(self, parts: Sequence[AnswerPart]) -> list[Delta]:
        found: list[Delta] = []
        for part in parts:
            text = self._marks.spelt(part.text, named=self._named)
            if part.call is not None:
                arguments = self._marks.spelt(part.call.arguments, named=self._named)
                own = self._marks.spelt(part.call.id, named=False)
                begun = Delta(call=self.calls, id=own, name=part.call.name)
                found += [begun, Delta(call=self.calls, text=arguments)]
                self.calls += 1
            elif part.kind == "thought":
                if self._thoughts_wanted and text:
                    found.append(Delta(text=text, thought=True))
            elif self._forced is not None:
                found += self._counted(self._forced.push(text))
            elif text:
                found.append(Delta(text=text))
        return _merged(found)

    def _counted(self, said: Sequence[tuple[int, str, str, str]]) -> list[Delta]:
        self.calls = max([self.calls, *(call + 1 for call, *_ in said)])
        return [Delta(call=call, id=id, name=name, text=text) for call, id, name, text in said]


def reader_for(asked: Asked, prepared: Prepared, index: int) -> AnswerReader:
    """A reader of a request's choice number ``index``."""
    return AnswerReader(asked, prepared.card, thinking=bool(prepared.thinking) and prepared.thinking[index // asked.n])


def _merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Deltas of the same kind one after the other, as one."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        same = last is not None and (last.call, last.thought) == (delta.call, delta.thought)
        if last is not None and same and not delta.name and not last.name:
            found[-1] = replace(last, text=last.text + delta.text)
        else:
            found.append(delta)
    return found
