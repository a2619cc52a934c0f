"""The items of an answer: thoughts, a message, calls of functions. Each change of them is an event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from services.api.http.responses.tool_names import TEXT, ToolName, text_in

Event = dict[str, Any]
Ended = Literal["completed", "incomplete"]
# With what OpenAI's ids of each kind begin.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLS = ("function_call", "custom_tool_call")


def owner_of(item_id: str) -> str:
    """The id of the response that an item's id names."""
    return f"resp_{item_id.partition('_')[2].partition('_')[0]}"


class OutputItems:
    """An answer's items, made piece by piece. One at a time is open.

    Args:
        response_id: of the response that they belong to.

    Attributes:
        done: the items that have ended.
    """

    def __init__(self, response_id: str) -> None:
        self._stem = response_id.removeprefix("resp_")
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        # Tokens whose text has not been told: that text, and their log-probabilities.
        self._untold: list[tuple[str, Any]] = []
        self.done: list[dict[str, Any]] = []

    def note(self, tokens: Iterable[tuple[str, Any]]) -> None:
        """Take the texts of tokens with their log-probabilities, before what is made of them is told."""
        self._untold += tokens

    def think(self, text: str) -> list[Event]:
        """Add to the thoughts."""
        self._logprobs_of(text)
        opened = self._opened("reasoning", summary=[], content=[])
        return [*opened, self._delta("response.reasoning_text.delta", text, content_index=0)]

    def say(self, text: str) -> list[Event]:
        """Add to the message."""
        told = self._logprobs_of(text)
        opened = self._opened("message", role="assistant", content=[])
        self._logprobs += told
        return [*opened, self._delta("response.output_text.delta", text, content_index=0, logprobs=told)]

    def call(self, call_id: str, tool: ToolName) -> list[Event]:
        """Begin a call."""
        fields: dict[str, Any] = {"call_id": call_id, "name": tool.name}
        if tool.namespace:
            fields["namespace"] = tool.namespace
        kind, empty = ("custom_tool_call", TEXT) if tool.free else ("function_call", "arguments")
        return self._closed("completed") + self._opened(kind, **fields, **{empty: ""})

    def argue(self, text: str) -> list[Event]:
        """Add to the call's arguments. The text of a tool that takes one is told at the call's end."""
        self._logprobs_of(text)
        if self._item["type"] == "custom_tool_call":
            self._texts.append(text)
            return []
        return [self._delta("response.function_call_arguments.delta", text)]

    def end(self, how: Ended) -> list[Event]:
        """End the last item. An answer without any has an empty message."""
        begun = [] if self._item or self.done else self.say("")
        # What ends an answer has no text.
        self._logprobs += [logprob for _, logprob in self._untold]
        return begun + self._closed(how)

    def _logprobs_of(self, text: str) -> list[Any]:
        """The log-probabilities of the tokens that next spell a text; those before it spell what is told of by itself."""
        spelt = "".join(token for token, _ in self._untold)
        start = max(0, spelt.find(text))
        place, found, left = 0, [], []
        for token, logprob in self._untold:
            begin, place = place, place + len(token)
            if begin >= start + len(text) and token:
                left.append((token, logprob))
            elif place > start or (begin == start and not token):
                found.append(logprob)
        self._untold = left
        return found

    def _opened(self, kind: str, **fields: Any) -> list[Event]:
        if self._item.get("type") == kind:
            return []
        events = self._closed("completed")
        self._item = {
            "type": kind,
            "id": f"{_PREFIXES[kind]}_{self._stem}_{len(self.done)}",
            "status": "in_progress",
            **fields,
        }
        events.append(self._event("response.output_item.added", item=dict(self._item)))
        if kind not in _CALLS:
            events.append(self._part("response.content_part.added", self._content("")))
        return events

    def _closed(self, how: Ended) -> list[Event]:
        item = self._item
        if not item:
            return []
        text, kind = "".join(self._texts), item["type"]
        item["status"] = how
        if kind == "function_call":
            item["arguments"] = text
            events = [self._of_item("response.function_call_arguments.done", arguments=text)]
        elif kind == "custom_tool_call":
            told = "response.custom_tool_call_input"
            item[TEXT] = given = text_in(text)
            events = [self._of_item(f"{told}.delta", delta=given), self._of_item(f"{told}.done", input=given)]
        else:
            part = self._content(text)
            item["content"] = [part]
            done = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            events = [
                self._of_item(done, content_index=0, text=text, **logprobs),
                self._part("response.content_part.done", part),
            ]
        events.append(self._event("response.output_item.done", item=item))
        self.done.append(item)
        self._item, self._texts, self._logprobs = {}, [], []
        return events

    def _content(self, text: str) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._texts.append(text)
        return self._of_item(kind, delta=text, **fields)

    def _part(self, kind: str, part: dict[str, Any]) -> Event:
        return self._of_item(kind, content_index=0, part=part)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item["id"], **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.done), **fields}
