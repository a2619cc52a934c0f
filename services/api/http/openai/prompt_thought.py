"""Prompts that begin a thought, and how long it may be. The answer's form holds behind the thought, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.api.http.openai.mark_rules import MarkRules
from services.api.http.openai.request import Asked
from services.api.http.openai.tool_grammar import SPACE, TEXT
from services.api.messages import ChatMessage, RequestedSampling, RouterPort
from services.api.model_card import ModelCard
from services.structured_outputs.grammars import form_rule
from services.tool_formats import harmony
from services.tool_formats.catalogue import THOUGHTS
from speculation.types import StructuredOutputs

# Tokens of a prompt's end in which a mark shows.
_TAIL = 32


async def begins_thought(prompt: Sequence[int], asked: Asked, router: RouterPort, card: ModelCard) -> bool:
    """Whether a prompt ends within a thought, which the chat template, or the message that is continued, has begun."""
    if card.thoughts in ("", harmony.NAME):
        return False
    begin, end = THOUGHTS[card.thoughts]
    if asked.chat.continue_final_message and isinstance(message := asked.inputs[0][-1], ChatMessage):
        return message.content.rfind(begin) > message.content.rfind(end)
    return (await router.detokenize(prompt[-_TAIL:])).rstrip().endswith(begin)


def limits_thoughts(card: ModelCard) -> bool:
    """Whether the model's thoughts can be ended: their marks are tokens of their own."""
    if card.thoughts in ("", harmony.NAME):
        return False
    return all(_id_of(mark, card) is not None for mark in THOUGHTS[card.thoughts])


def limited_thought(sampling: RequestedSampling, card: ModelCard, most: int, *, thinking: bool) -> RequestedSampling:
    """The sampling of a request without a form, with a grammar that ends a thought behind so many tokens.

    Until then, and behind the thought, it allows every token, so that a thought that ends by itself has the same answer.

    Args:
        most: tokens of the thought; its marks are not counted.
        thinking: the prompt has begun the thought; otherwise the answer's first token may.
    """
    begin, end = THOUGHTS[card.thoughts]
    # An answer that ends within its thought is one, too; at the limit the mark alone can follow.
    ended, cut = f"{_up_to(most)} {MarkRules(card).mark(end)} rest", _up_to(most - 1)
    thought = f"({ended} | {cut})" if cut else f"({ended})?" if most else f"({ended})"
    opening = _id_of(begin, card)
    start = thought if thinking else f"<[{opening}]> {thought} | (<[^{opening}]> rest)?"
    text = "\n".join([f"start: {start}", f"any: <[^{_id_of(end, card)}]>", "rest: <[*]>*"])
    return replace(sampling, structured_outputs=StructuredOutputs(kind="grammar", text=text))


def _up_to(tokens: int) -> str:
    return f"any{{0,{tokens}}}" if tokens > 0 else ""


def _id_of(mark: str, card: ModelCard) -> int | None:
    return card.special_tokens.get(mark, card.added_tokens.get(mark))


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
