"""Renders a model's chat template as transformers does, without transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from services.router.template_process import StoppedRendering, TemplateProcesses

# Marks the end of a message that is to be continued; its space shows whether the template trims messages.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# A text that no template holds.
_MARKER = "Outrider7marker"
_processes = TemplateProcesses()


class ChatTemplate:
    """A template, which is compiled and rendered in processes that all templates share.

    Args:
        source: Jinja source, as models carry it.
        tokens: special tokens that the template may use, by name, such as bos_token.

    Raises:
        jinja2.TemplateSyntaxError: the source is not a valid template.

    Attributes:
        variables: names that the template reads and does not define, except those of special tokens and functions.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        found = _processes.variables(source)
        self._tokens = dict(tokens)
        self._source = source
        self.variables = found - tokens.keys()

    def holds(self, text: str) -> bool:
        """Whether a text stands in the template."""
        return text in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation as text, up to the point where the assistant's answer begins.

        Args:
            options: variables for the template; without ``add_generation_prompt``, that is True.
            continue_final_message: end within the last message, as transformers does.

        Raises:
            jinja2.TemplateError: the template rejects the conversation, fails on it, does what the sandbox forbids, or takes
                too much time or memory.
            ResourceExhausted: there is no process for it; there may be one later.
        """
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] = _tagged(shown[-1]["content"])
        if self.reads_parts:
            for message in shown:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        text = self._written(shown, options or {})
        return _before_tag(text) if continue_final_message else text

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Whether it reads a message's content as a list of parts, and shows nothing of a text."""

        def shows(content: object) -> bool:
            try:
                text = self._written([{"role": "user", "content": content}], {})
            except StoppedRendering:
                # Whatever it is given: whoever asked need not wait for that once more.
                raise
            except jinja2.TemplateError:
                return False
            # A list that is written as it is has not been read.
            return _MARKER in text and f"'{_MARKER}'" not in text

        return not shows(_MARKER) and shows([{"type": "text", "text": _MARKER}])

    def _written(self, shown: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens, **options}
        return _processes.render(self._source, {**given, "messages": list(shown)})


def _tagged(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A content whose end is marked; one of parts ends with a text, or its thought is continued by one."""
    if isinstance(content, str):
        return content + _TAG
    *parts, last = content
    if last["type"] == "text":
        return [*parts, {**last, "text": last["text"] + _TAG}]
    return [*content, {"type": "text", "text": _TAG}]


def _before_tag(text: str) -> str:
    """The text up to the end of the message that was tagged."""
    at = text.rfind(_TAG.strip())
    if at < 0:
        raise jinja2.TemplateError("it does not show the end of the last message, which can so not be continued")
    # A template that trims messages has taken the tag's space, and would have taken the message's own.
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
