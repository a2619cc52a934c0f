"""The prompts of a benchmark, from a file or the built-in ones, and the requests that they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.bench.records import Prompt, Request, TimedAnswer
from services.api.messages import ChatMessage
from services.prompt_files.forms import FilePrompt
from services.prompt_files.reader import read_file_prompts
from services.router.tokens import Tokens
from speculation.errors import ConfigurationError

BUILTIN = "builtin"
_BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")


def read_prompts(source: str, per_task: int | None = None, option: str = "--prompts") -> list[Prompt]:
    """The prompts of a file, at most ``per_task`` of each task, grouped by task in the order of the file.

    Args:
        source: ``builtin``, or a file of any form that ``services.prompt_files`` reads.
        option: what names it on the command line, for errors.

    Raises:
        ConfigurationError: the file cannot be read or holds no prompt, or an entry is malformed; names the line.
    """
    path = _BUILTIN_FILE if source == BUILTIN else Path(source)
    tasks: dict[str, list[Prompt]] = {}
    seen = set()
    for number, (where, asked) in enumerate(read_file_prompts(path, option), 1):
        prompt = _prompt(asked, where, number)
        if (prompt.task, prompt.id) in seen:
            raise ConfigurationError(f"{prompt.id} occurs twice in {prompt.task}", field=where)
        seen.add((prompt.task, prompt.id))
        tasks.setdefault(prompt.task, []).append(prompt)
    if not tasks:
        raise ConfigurationError("there is no prompt in it", field=option, verb="", value=source)
    return [prompt for prompts in tasks.values() for prompt in prompts[:per_task]]


def _prompt(asked: FilePrompt, where: str, number: int) -> Prompt:
    """What is asked of the model, which gives the answers to earlier turns itself."""
    others = {message.role for message in asked.messages} - {"system", "user", "assistant"}
    if others:
        raise ConfigurationError(field=f"{where}: role", value=min(others), allowed="system, user or assistant")
    said = {role: [message.content for message in asked.messages if message.role == role] for role in ("system", "user")}
    return Prompt(
        id=asked.id or str(number),
        task=asked.task,
        turns=(*said["user"], *asked.further),
        system="\n\n".join(said["system"]),
    )


Ask = Callable[[Sequence[Request]], Sequence[TimedAnswer]]


def make_requests(prompts: Sequence[Prompt], tokens: Tokens, ask: Ask, seed: int) -> list[Request]:
    """One request per turn, in the order of the prompts.

    A turn after the first needs an answer to the one before. ``ask`` provides it (by plain decoding, not timed), so that all
    contestants continue the same conversation, whatever they answered themselves.
    """
    made: list[list[Request]] = [[] for _ in prompts]
    dialogues = [[ChatMessage(role="system", content=each.system)] if each.system else [] for each in prompts]
    number = 0
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        going = [i for i, prompt in enumerate(prompts) if turn < len(prompt.turns)]
        for i in going:
            dialogues[i].append(ChatMessage(role="user", content=prompts[i].turns[turn]))
            name = f"{prompts[i].task}/{prompts[i].id}" + (f"/turn {turn + 1}" if len(prompts[i].turns) > 1 else "")
            ids = _encode(tokens, dialogues[i])
            made[i].append(
                Request(id=name, task=prompts[i].task, prompt=ids, seed=seed + number, turn=prompts[i].turns[turn])
            )
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
