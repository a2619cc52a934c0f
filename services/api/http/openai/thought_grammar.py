"""An answer's form where the model thinks first: it holds for the answer, not for the thought before it, as in vLLM."""

from __future__ import annotations

from dataclasses import replace

from services.api.http.openai.mark_rules import MarkRules
from services.api.http.openai.tool_grammar import SPACE, TEXT
from services.api.messages import ModelCard, RequestedSampling
from services.grammars import form_rule
from services.tool_formats import harmony
from services.tool_formats.thoughts import THOUGHTS
from speculation.types import StructuredOutputs


def behind_thought(sampling: RequestedSampling, card: ModelCard, *, thinking: bool) -> RequestedSampling:
    """The request's sampling, with a form that begins behind the thought.

    Args:
        thinking: the prompt has begun the thought; otherwise there may be one, or none.

    Raises:
        InvalidArgument: the form is not valid.
    """
    form = sampling.structured_outputs
    if form is None or not card.thoughts:
        return sampling
    rules = _messages(MarkRules(card)) if card.thoughts == harmony.NAME else _thought(MarkRules(card), card, thinking)
    text = "\n".join([*rules, TEXT, f"answer: {form_rule(form)}"])
    return replace(sampling, structured_outputs=StructuredOutputs(kind="grammar", text=text))


def _thought(marks: MarkRules, card: ModelCard, thinking: bool) -> list[str]:
    begin, end = THOUGHTS[card.thoughts]
    thought = "thought space" if thinking else f"({marks.mark(begin)} thought space)?"
    return [f"start: {thought} answer", *marks.until("thought", end), SPACE]


def _messages(marks: MarkRules) -> list[str]:
    channel, message = marks.mark(harmony.CHANNEL), marks.mark(harmony.MESSAGE)
    return [
        f'start: said* {channel} "final" {message} answer',
        f'said: {channel} "analysis" {message} said_end {marks.mark(harmony.START)} "assistant"',
        *marks.until("said_end", harmony.END),
    ]
