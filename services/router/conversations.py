"""A conversation as its chat template writes it. What the template would leave out is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from services.api.messages import TAKEN, ChatMessage, ChatOptions
from services.router import generic_tools
from services.router.named_templates import ChatTemplates
from services.router.template_traits import TemplateTraits, thoughts_of, traits_of, with_thought
from services.router.templates import ChatTemplate
from services.tool_formats import harmony
from services.tool_formats.raw_json import begun_members, members
from speculation import limits
from speculation.errors import InvalidArgument

# Where a message has what the assistant thought, until it is put where the template reads it.
_THOUGHT = "reasoning_content"

Messages = list[dict[str, Any]]


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check what holds for every template.

    Raises:
        InvalidArgument: no messages, too many, or one without a role.
    """
    if not 1 <= len(messages) <= limits.MAX_MESSAGES:
        raise InvalidArgument("messages", f"{len(messages)} messages", f"1 to {limits.MAX_MESSAGES} messages")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidArgument(f"messages[{index}].role", "empty", "a role, such as user")


class Conversations:
    """Renders conversations.

    Args:
        generic: tools and calls that the template has no place for are written in a form of our own.
        thoughts: what models think before they answer is told apart, where they mark it.
        added: tokens that the tokenizer has beside those of its vocabulary, by name.
    """

    def __init__(
        self, templates: ChatTemplates, *, generic: bool, thoughts: bool = True, added: Collection[str] = ()
    ) -> None:
        self._templates = templates
        self._generic = generic
        self._tells_thoughts = thoughts
        self._added = added
        self._traits: dict[int, TemplateTraits] = {}

    @cached_property
    def tool_format(self) -> str:
        """As in ``ModelCard``."""
        template = self._templates.with_tools
        if template is None:
            return ""
        traits = self._traits_of(template)
        if not traits.tools and self._generic:
            return generic_tools.FORMAT
        # Its messages are read only where thoughts are.
        return "" if traits.tool_format == harmony.NAME and not self._tells_thoughts else traits.tool_format

    @cached_property
    def thoughts(self) -> str:
        """As in ``ModelCard``."""
        template = self._templates.default or self._templates.with_tools
        return thoughts_of(template, self._added) if self._tells_thoughts and template is not None else ""

    @cached_property
    def reads_thoughts(self) -> bool:
        """As in ``ModelCard``."""
        return any(self._traits_of(each).thought_field for each in self._templates.used)

    @cached_property
    def named_roles(self) -> tuple[str, ...]:
        """As in ``ModelCard``."""
        return tuple(sorted({role for each in self._templates.used for role in self._traits_of(each).named_roles}))

    @cached_property
    def late_system(self) -> bool:
        """As in ``ModelCard``."""
        return all(self._traits_of(each).late_system for each in self._templates.used)

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Names of what the templates read besides messages and tools."""
        return tuple(sorted({name for each in self._templates.used for name in each.variables} - {*TAKEN}))

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        """The conversation as text, up to the beginning of the assistant's answer.

        Raises:
            InvalidArgument: no messages, too many, one without a role, what the template does not read, or there is none.
            jinja2.TemplateError: the template rejects the conversation.
        """
        check_messages(messages)
        template = self._templates.of(tools=bool(options.tools))
        traits = self._traits_of(template)
        shown = [_as_dict(message, index, traits) for index, message in enumerate(messages)]
        given = _template_options(options, template)
        shown, given = self._with_tools(shown, given, options, traits)
        shown = [_with_thought(entry, traits) for entry in shown]

        def rendered(messages: Messages) -> str:
            return template.render(messages, given, continue_final_message=options.continue_final_message)

        text = rendered(shown)
        _check_texts(messages, text)
        _check_names(messages, shown, text, rendered)
        return text

    def _traits_of(self, template: ChatTemplate) -> TemplateTraits:
        found = self._traits.get(id(template))
        if found is None:
            found = self._traits[id(template)] = traits_of(template)
        return found

    def _with_tools(
        self, shown: Messages, given: dict[str, Any], options: ChatOptions, traits: TemplateTraits
    ) -> tuple[Messages, dict[str, Any]]:
        """The messages and options with tools and calls where the template reads them."""
        tools = json.loads(options.tools) if options.tools else []
        called = next((index for index, message in enumerate(shown) if "tool_calls" in message), None)
        # Where the tools are shown in our form, so are the calls.
        own = self._generic and (not traits.calls or (bool(tools) and not traits.tools))
        if own and (called is not None or any(message["role"] == "tool" for message in shown)):
            shown = generic_tools.calls_as_text(shown)
        elif called is not None and not traits.calls:
            raise _no_place(f"messages[{called}].tool_calls", "set", "calls of tools")
        if not tools:
            return shown, given
        if traits.tools:
            return shown, {**given, "tools": tools}
        if not self._generic:
            raise _no_place("tools", "set", "tools")
        return generic_tools.with_tools(shown, tools, system=traits.system), given


def _as_dict(message: ChatMessage, index: int, traits: TemplateTraits) -> dict[str, Any]:
    """A message with the names that templates know.

    Raises:
        InvalidArgument: it carries what the template does not read; names it.
    """
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        entry["name"] = message.name
    if message.reasoning:
        if not traits.thought_field:
            raise _no_place(f"messages[{index}].reasoning_content", message.reasoning, "thoughts")
        entry[_THOUGHT] = message.reasoning
    if message.tool_calls:
        calls = json.loads(message.tool_calls)
        entry["tool_calls"] = [_written(call, traits) for call in calls]
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _with_thought(entry: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    thought = entry.get(_THOUGHT)
    if thought is None:
        return entry
    return with_thought({k: v for k, v in entry.items() if k != _THOUGHT}, traits.thought_field, thought)


def _written(call: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    """A call with its arguments as the template reads them: of a call that was cut, perhaps only those that are whole."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = arguments if traits.cut_arguments else _whole_members(arguments)
    elif traits.text_arguments:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _whole_members(text: str) -> dict[str, Any]:
    """The members of an object that are all there; one that JSON's reader refuses, as the text that it is."""
    try:
        found = members(text)[0]
    except ValueError:
        found = dict(list(begun_members(text).items())[:-1])
    return {name: _value(value) for name, value in found.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _template_options(options: ChatOptions, template: ChatTemplate) -> dict[str, Any]:
    """What the template is given beside the messages.

    Raises:
        InvalidArgument: an option that the template does not read.
    """
    given: dict[str, Any] = {"add_generation_prompt": options.add_generation_prompt}
    extra: Mapping[str, Any] = json.loads(options.template_kwargs) if options.template_kwargs else {}
    for name, value in extra.items():
        field = f"chat_template_kwargs.{name}"
        if name in TAKEN or name not in template.variables:
            free = ", ".join(sorted(template.variables - {*TAKEN})) or "none"
            raise InvalidArgument(field, value, f"unset: of such options, this model's chat template reads: {free}")
        given[name] = value
    return given


def _check_texts(messages: Sequence[ChatMessage], text: str) -> None:
    """Check that the model is shown what is said to it. Of the assistant's own texts, templates cut out thoughts.

    Raises:
        InvalidArgument: a text is missing; names the message.
    """
    squeezed, at = "", 0
    for index, message in enumerate(messages):
        said = message.content.strip()
        if message.role == "assistant" or not said:
            continue
        found = text.find(said, at)
        if found >= 0:
            at = found
            continue
        # Before the last one, with other white space, or spelt as JSON.
        squeezed = squeezed or "".join(text.split())
        spelt = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
        if said not in text and not any("".join(each.split()) in squeezed for each in spelt):
            allowed = f"what this model's chat template shows: it leaves out this text of the role {message.role}"
            raise InvalidArgument(f"messages[{index}].content", said[: limits.MAX_STOP_CHARACTERS], allowed)


def _check_names(messages: Sequence[ChatMessage], shown: Messages, text: str, rendered: Callable[[Messages], str]) -> None:
    """Check that the template writes names. A tool's name says which call it answers; templates may go by the order instead.

    Raises:
        InvalidArgument: it leaves those of a role out; names the message.
    """
    for role in dict.fromkeys(message.role for message in messages if message.name and message.role != "tool"):
        without = [{k: v for k, v in entry.items() if k != "name" or entry["role"] != role} for entry in shown]
        if rendered(without) == text:
            index = next(index for index, message in enumerate(messages) if message.name and message.role == role)
            raise _no_place(f"messages[{index}].name", messages[index].name, f"names of the role {role}")


def _no_place(field: str, value: str, what: str) -> InvalidArgument:
    return InvalidArgument(field, value, f"unset: this model's chat template has no place for {what}")
