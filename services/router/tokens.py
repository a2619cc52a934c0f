"""Converts text to token ids, and tokens back to text one at a time."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jinja2 import TemplateError

from services.client_api import ChatMessage
from services.router.tokenizer_file import open_file
from speculation import limits
from speculation.errors import InvalidArgument

_BROKEN = "\ufffd"
# Bytes of the longest character in UTF-8.
_CHARACTER_BYTES = 4
# Each new token is decoded together with its predecessors. Their number is cut to about half of this when it exceeds it.
_WINDOW = 16


class Backend(Protocol):
    """A tokenizer library with the model's tokenizer and chat template."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of ``text``, with the special tokens that the model's tokenizer adds to a text."""

    def encode_chat(self, conversation: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Ids of a conversation, up to the beginning of the assistant's answer.

        Raises:
            jinja2.TemplateError: the chat template refuses it.
        """

    @property
    def special_ids(self) -> Container[int]:
        """Ids of special tokens, which have no text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, without special tokens."""


def load(model_path: str) -> Backend:
    """A model's tokenizer. transformers is imported only if tokenizer.json alone might give other results.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, or is not a fast one.
    """
    found = open_file(Path(model_path))
    if found is not None:
        return found
    from services.router.transformers_tokenizer import TransformersTokenizer

    return TransformersTokenizer(model_path)


class Tokens:
    """A model's tokeniser and chat template.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, or is not a fast one.
    """

    def __init__(self, model_path: str) -> None:
        self._backend = load(model_path)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._backend.has_chat_template

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, with the special tokens that the model's tokeniser adds.

        Raises:
            InvalidArgument: the text is empty.
        """
        if not text:
            raise InvalidArgument("prompt", "empty", "at least one character")
        return tuple(self._backend.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation, up to the beginning of the assistant's answer.

        Raises:
            InvalidArgument: no messages, too many, a message without a role, or the model has no chat template or one that
                refuses the conversation.
        """
        if not 1 <= len(messages) <= limits.MAX_MESSAGES:
            raise InvalidArgument("messages", f"{len(messages)} messages", f"1 to {limits.MAX_MESSAGES} messages")
        for index, message in enumerate(messages):
            if not message.role:
                raise InvalidArgument(f"messages[{index}].role", "empty", "a role, such as user")
        if not self.has_chat_template:
            raise InvalidArgument("messages", "a conversation", "a prompt or token ids: this model has no chat template")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return tuple(self._backend.encode_chat(conversation))
        except TemplateError as error:
            raise InvalidArgument("messages", "a conversation", f"what the chat template allows: {error}") from error

    def detokenizer(self) -> Detokenizer:
        """A new detokenizer, for one answer."""
        return Detokenizer(self._backend)


class Detokenizer:
    """Turns an answer's tokens into text one by one, and holds back incomplete characters.

    A token's text may depend on its neighbours, so the last few tokens are decoded together with each new one. Whatever
    follows the text already shown is new. Together the pieces equal the text of all tokens decoded at once. (One exception:
    where a tokeniser spells characters in bytes, an incomplete one makes it replace the whole characters before it as well,
    which may have been shown already.)
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._window: list[int] = []
        # The part of the window's text that was shown.
        self._shown = ""
        # Tokens since the window's text last ended in a whole character.
        self._broken = 0

    def push(self, token: int) -> str:
        """The new text after ``token``; empty if the text ends within a character."""
        if token in self._backend.special_ids:
            return ""
        self._window.append(token)
        text = self._backend.decode(self._window)
        end = len(text)
        # An incomplete character decodes to this. So does a token that really means it, which is then only delayed.
        if text.endswith(_BROKEN):
            self._broken += 1
            if self._broken < _CHARACTER_BYTES:
                return ""
            # So many tokens are too long for one incomplete character; only the last few may still be one.
            end -= _CHARACTER_BYTES - 1
        else:
            self._broken = 0
        piece = self._show(text, end)
        if len(self._window) > _WINDOW:
            self._forget(text)
        return piece

    def flush(self) -> str:
        """The text held back, with a replacement character for broken UTF-8. Ends the answer."""
        text = self._backend.decode(self._window)
        rest = self._show(text, len(text))
        self._window, self._shown, self._broken = [], "", 0
        return rest

    def _show(self, text: str, end: int) -> str:
        # The text gets shorter when further bytes complete a character that looked broken.
        shown = len(self._shown) if len(self._shown) <= len(text) else _in_common(self._shown, text)
        if end <= shown:
            return ""
        self._shown = text[:end]
        return text[shown:end]

    def _forget(self, text: str) -> None:
        """Drop old tokens from the window: keep at least ``_WINDOW // 2``, and as few as still give the same end of text."""
        hidden = len(text) - len(self._shown)
        rest = text
        for kept in range(_WINDOW // 2, _WINDOW):
            rest = self._backend.decode(self._window[-kept:])
            if len(rest) > hidden and text.endswith(rest):
                break
        else:
            # Some tokens have no text of their own, so a longer window may yet give the same end.
            if len(self._window) < 4 * _WINDOW:
                return
        self._window = self._window[-kept:]
        self._shown = rest[: max(0, len(rest) - hidden)]


def _in_common(first: str, second: str) -> int:
    """Length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
