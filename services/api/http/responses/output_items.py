"""The items of an answer: thoughts, a message, calls of functions. Each change of them is an event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

Event = dict[str, Any]
Ended = Literal["completed", "incomplete"]
# With what OpenAI's ids of each kind begin.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def owner_of(item_id: str) -> str:
    """The id of the response that an item's id names."""
    return f"resp_{item_id.partition('_')[2].partition('_')[0]}"


class OutputItems:
    """An answer's items, made piece by piece. One at a time is open.

    Args:
        response_id: of the response that they belong to.
        calls: the answer may call functions: white space before a call is no message then.

    Attributes:
        done: the items that have ended.
    """

    def __init__(self, response_id: str, *, calls: bool) -> None:
        self._stem = response_id.removeprefix("resp_")
        self._calls = calls
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []
        # Log-probabilities of the open message, and of tokens whose text has not been told.
        self._logprobs: list[Any] = []
        self._untold: list[Any] = []
        self._space = ""
        self.done: list[dict[str, Any]] = []

    def note(self, logprobs: Iterable[Any]) -> None:
        """Take the log-probabilities of tokens. They are told with the next text of a message, or at its end."""
        self._untold += logprobs

    def think(self, text: str) -> list[Event]:
        """Add to the thoughts."""
        opened = self._opened("reasoning", summary=[], content=[])
        self._untold = []
        return [*opened, self._delta("response.reasoning_text.delta", text, content_index=0)]

    def say(self, text: str) -> list[Event]:
        """Add to the message."""
        opened: list[Event] = []
        if self._item.get("type") != "message":
            text, self._space = self._space + text, ""
            if self._calls and not text.strip():
                self._space = text
                return []
        told, self._untold = self._untold, []
        if self._item.get("type") != "message":
            opened = self._opened("message", role="assistant", content=[])
        self._logprobs += told
        return [*opened, self._delta("response.output_text.delta", text, content_index=0, logprobs=told)]

    def call(self, call_id: str, name: str) -> list[Event]:
        """Begin a call."""
        self._space = ""
        self._untold = []
        return self._closed("completed") + self._opened("function_call", call_id=call_id, name=name, arguments="")

    def argue(self, text: str) -> list[Event]:
        """Add to the call's arguments."""
        self._untold = []
        return [self._delta("response.function_call_arguments.delta", text)]

    def end(self, how: Ended) -> list[Event]:
        """End the last item. An answer without any has an empty message."""
        if self._item:
            return self._closed(how)
        if self.done:
            return []
        self._calls = False
        return self.say("") + self._closed(how)

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
        if kind != "function_call":
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
        else:
            self._logprobs += self._untold if kind == "message" else []
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
        self._item, self._texts, self._logprobs, self._untold = {}, [], [], []
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
