"""Turns prompts into requests: the same token ids for every contestant, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.bench.records import Prompt, Request, TimedAnswer
from services.api.messages import ChatMessage
from services.router.tokens import Tokens

Ask = Callable[[Sequence[Request]], Sequence[TimedAnswer]]


def make_requests(prompts: Sequence[Prompt], tokens: Tokens, ask: Ask, seed: int) -> list[Request]:
    """One request per turn, in the order of the prompts.

    A turn after the first needs an answer to the one before. ``ask`` provides it (by plain decoding, not timed), so that all
    contestants continue the same conversation, whatever they answered themselves.
    """
    made: list[list[Request]] = [[] for _ in prompts]
    dialogues: list[list[ChatMessage]] = [[] for _ in prompts]
    number = 0
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        going = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        for i in going:
            dialogues[i].append(ChatMessage(role="user", content=prompts[i].turns[turn]))
            name = f"{prompts[i].task}/{prompts[i].id}" + (f"/turn {turn + 1}" if len(prompts[i].turns) > 1 else "")
            ids = _encode(tokens, dialogues[i])
            made[i].append(Request(id=name, task=prompts[i].task, prompt=ids, seed=seed + number))
            number += 1
        continued = [i for i in going if turn + 1 < len(prompts[i].turns)]
        for i, answer in zip(continued, ask([made[i][turn] for i in continued]) if continued else (), strict=True):
            dialogues[i].append(ChatMessage(role="assistant", content=_text(tokens, answer)))
    return [request for requests in made for request in requests]


def _encode(tokens: Tokens, dialogue: Sequence[ChatMessage]) -> tuple[int, ...]:
    """Encode with the model's chat template; a base model, which has none, continues the text."""
    if tokens.has_chat_template:
        return tokens.encode_chat(dialogue)
    return tokens.encode("\n\n".join(message.content for message in dialogue))


def _text(tokens: Tokens, answer: TimedAnswer) -> str:
    detokenizer = tokens.detokenizer()
    return "".join(detokenizer.push(token) for token in answer.tokens) + detokenizer.flush()
