"""What an entry of a prompts file asks, by the form of the set that it comes from. Fields say which form it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.api.messages import ChatMessage
from speculation.errors import ConfigurationError

FORMS = (
    "turns (Spec-Bench, MT-bench), messages, conversations (ShareGPT), article (CNN/DM), dialogue (DialogSum), "
    "mr (E2E), question (GSM8K), prompt (HumanEval), text (MBPP, with its test_list)"
)
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant"}
_SHAREGPT_ROLES["system"] = "system"

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePrompt:
    """A conversation that ends with the user's turn.

    Attributes:
        id: the set's own name of it; empty: it has none.
        task: the set, or the kind of task that the entry names.
        messages: with the answers that the set holds.
        further: turns of the user that follow answers which the set does not hold.
        answer: what the set says to the last message; empty: it says nothing.
    """

    id: str = ""
    task: str
    messages: tuple[ChatMessage, ...]
    further: tuple[str, ...] = ()
    answer: str = ""


def prompt_of(entry: Any, where: str) -> FilePrompt:
    """What an entry asks.

    Args:
        where: its file and line, for errors.

    Raises:
        ConfigurationError: it has no known form, or a field of it is empty or malformed; names the line and the field.
    """
    if not isinstance(entry, dict):
        raise ConfigurationError(field=where, allowed=f"an object with one of {FORMS}")
    for fields, read in _FORMS:
        if all(field in entry for field in fields):
            return read(entry, where)
    raise ConfigurationError(
        f"has the fields {', '.join(sorted(map(str, entry))) or 'none'}; must have one of {FORMS}", field=where
    )


def _spec_bench(entry: Entry, where: str) -> FilePrompt:
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns:
        raise ConfigurationError("turns must be a list of texts", field=where)
    first, *further = [_text(turn, f"{where}: turns[{index}]") for index, turn in enumerate(turns)]
    task = str(entry.get("category", "text"))
    return FilePrompt(id=_id(entry, "question_id"), task=task, messages=_user(first), further=tuple(further))


def _messages(entry: Entry, where: str) -> FilePrompt:
    messages, answer = _conversation(entry, "messages", "role", "content", where)
    return FilePrompt(id=_id(entry, "id"), task="chat", messages=messages, answer=answer)


def _sharegpt(entry: Entry, where: str) -> FilePrompt:
    messages, answer = _conversation(entry, "conversations", "from", "value", where, _SHAREGPT_ROLES)
    return FilePrompt(id=_id(entry, "id"), task="sharegpt", messages=messages, answer=answer)


def _cnn_dm(entry: Entry, where: str) -> FilePrompt:
    # The prompt of DISCO's appendix B.3.
    article = _text(entry["article"], f"{where}: article")
    messages = _user(f"Summarize:\n{article}\nSummary:\n")
    return FilePrompt(id=_id(entry, "id"), task="cnn_dm", messages=messages, answer=_said(entry, "highlights"))


def _dialogsum(entry: Entry, where: str) -> FilePrompt:
    dialogue = _text(entry["dialogue"], f"{where}: dialogue")
    text = f"Summarize this dialogue:\n{dialogue}\nSummary:\n"
    return FilePrompt(id=_id(entry, "fname", "id"), task="dialogsum", messages=_user(text), answer=_said(entry, "summary"))


def _e2e(entry: Entry, where: str) -> FilePrompt:
    field = "mr" if "mr" in entry else "meaning_representation"
    meaning = _text(entry[field], f"{where}: {field}")
    messages = _user(f"Write one or two sentences that say this: {meaning}")
    return FilePrompt(task="e2e", messages=messages, answer=_said(entry, "ref", "human_reference"))


def _mbpp(entry: Entry, where: str) -> FilePrompt:
    # The prompt of DISCO's appendix B.1; the sanitised set calls the text "prompt".
    field = "text" if "text" in entry else "prompt"
    text, tests = _text(entry[field], f"{where}: {field}"), entry["test_list"]
    if not isinstance(tests, list) or not tests:
        raise ConfigurationError("test_list must be a list of texts", field=where)
    test = _text(tests[0], f"{where}: test_list[0]")
    messages = _user(f'"""{text}\n{test}\n"""')
    return FilePrompt(id=_id(entry, "task_id"), task="mbpp", messages=messages, answer=_said(entry, "code"))


def _plain(field: str, task: str) -> Callable[[Entry, str], FilePrompt]:
    def read(entry: Entry, where: str) -> FilePrompt:
        return FilePrompt(
            id=_id(entry, "task_id", "id"),
            task=task,
            messages=_user(_text(entry[field], f"{where}: {field}")),
            answer=_said(entry, "answer", "canonical_solution"),
        )

    return read


# Of several forms that fit, the first one is meant.
_FORMS: tuple[tuple[tuple[str, ...], Callable[[Entry, str], FilePrompt]], ...] = (
    (("turns",), _spec_bench),
    (("messages",), _messages),
    (("conversations",), _sharegpt),
    (("article",), _cnn_dm),
    (("dialogue",), _dialogsum),
    (("mr",), _e2e),
    (("meaning_representation",), _e2e),
    (("text", "test_list"), _mbpp),
    (("prompt", "test_list"), _mbpp),
    (("prompt", "task_id"), _plain("prompt", "humaneval")),
    (("prompt",), _plain("prompt", "text")),
    (("question", "answer"), _plain("question", "gsm8k")),
    (("question",), _plain("question", "text")),
    (("text",), _plain("text", "text")),
)


def _conversation(
    entry: Entry, field: str, role_field: str, text_field: str, where: str, roles: Mapping[str, str] | None = None
) -> tuple[tuple[ChatMessage, ...], str]:
    """The messages up to the last one of the user, and what the assistant says to it.

    Args:
        roles: what the file's roles mean; None: what they say.
    """
    messages = entry[field]
    if not isinstance(messages, list):
        raise ConfigurationError(f"{field} must be a list of objects with {role_field} and {text_field}", field=where)
    found = []
    for index, message in enumerate(messages):
        at = f"{where}: {field}[{index}]"
        if not isinstance(message, dict):
            raise ConfigurationError(f"{at} must be an object with {role_field} and {text_field}", about=at)
        role = _text(message.get(role_field), f"{at}.{role_field}")
        if roles is not None:
            if role not in roles:
                raise ConfigurationError(field=f"{at}.{role_field}", value=role, allowed=f"one of {', '.join(roles)}")
            role = roles[role]
        found.append(ChatMessage(role=role, content=_text(message.get(text_field), f"{at}.{text_field}")))
    after: list[ChatMessage] = []
    while found and found[-1].role != "user":
        after.append(found.pop())
    if not found:
        raise ConfigurationError(f"{field} has no message whose role is user", field=where)
    answer = after[-1].content if after and after[-1].role == "assistant" else ""
    return tuple(found), answer or ""


def _user(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=text),)


def _id(entry: Entry, *fields: str) -> str:
    return next((str(entry[field]) for field in fields if field in entry), "")


def _said(entry: Entry, *fields: str) -> str:
    """The answer that the set holds, in the first of these fields that is a text."""
    return next((entry[field] for field in fields if isinstance(entry.get(field), str) and entry[field].strip()), "")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(field=what, value=json.dumps(value)[:80], allowed="a text that is not empty")
    return value
