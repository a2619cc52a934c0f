"""Options of chat templates that fields of a body stand for: how long the model thinks, whether at all, how much it says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from services.api.http.openai.fields import Fields
from services.api.http.openai.tool_choice import ToolUse
from services.api.messages import ChatOptions
from services.api.model_card import ModelCard

# What templates that read it call how long the model thinks, and OpenAI's API, too; the same of how much it says.
EFFORT, VERBOSITY = "reasoning_effort", "verbosity"
# What vLLM calls the most tokens of a thought.
LIMIT = "thinking_token_budget"
# What templates call the option whether the model thinks first.
SWITCHES = ("enable_thinking", "thinking")
_NOT_AT_ALL, _AS_IT_IS = "none", "medium"


def read_chat_options(fields: Fields, tools: ToolUse | None) -> ChatOptions:
    """How the conversation is rendered."""
    begins, continues = fields.truth("add_generation_prompt"), fields.truth("continue_final_message") or False
    if continues and begins:
        raise fields.refuse("continue_final_message", True, "false where add_generation_prompt is true")
    kwargs = fields.mapping("chat_template_kwargs") or {}
    effort, verbosity = fields.text(EFFORT), fields.one_of(VERBOSITY)
    if verbosity not in (None, _AS_IT_IS):
        kwargs = {VERBOSITY: verbosity, **kwargs}
    if effort is not None:
        kwargs = {EFFORT: effort, **kwargs}
    options = ChatOptions(
        template_kwargs=written(kwargs),
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
    )
    return options if tools is None else replace(options, tools=tools.shown)


def with_switch(options: ChatOptions, card: ModelCard) -> ChatOptions:
    """The options with what the effort says of thinking at all, for templates that have a switch for that."""
    given = given_in(options)
    switch = next((name for name in SWITCHES if name in card.template_options), None)
    if switch is None or EFFORT not in given:
        return options
    thinks = given[EFFORT] != _NOT_AT_ALL
    # What a request says of the switch itself goes before.
    given = {switch: thinks, **given}
    if not thinks:
        del given[EFFORT]
    return replace(options, template_kwargs=written(given))


def with_thinking(options: ChatOptions, card: ModelCard, wanted: bool) -> ChatOptions | None:
    """The options with whether the model thinks; None: its chat template has no switch for that."""
    switch = next((name for name in SWITCHES if name in card.template_options), None)
    return None if switch is None else replace(options, template_kwargs=written({switch: wanted, **given_in(options)}))


def given_in(options: ChatOptions) -> dict[str, Any]:
    """The template's options that a request sets, by name."""
    given: dict[str, Any] = json.loads(options.template_kwargs) if options.template_kwargs else {}
    return given


def written(given: dict[str, Any]) -> str:
    """The template's options as text; empty: none."""
    return json.dumps(given, ensure_ascii=False) if given else ""
