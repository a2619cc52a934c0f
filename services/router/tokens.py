"""Text to token ids, and back one token at a time."""

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
# Longest character in UTF-8.
_CHARACTER_BYTES = 4
# Tokens that are decoded with a new one: from half to as many.
_WINDOW = 16


class Backend(Protocol):
    """What turns text into ids and back: a library's tokenizer with the model's chat template."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""

    def encode(self, text: str) -> Sequence[int]:
        """Ids of ``text``, with the special tokens that the model wants around a text."""

    def encode_chat(self, conversation: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Ids of a conversation, up to where the assistant's answer begins.

        Raises:
            jinja2.TemplateError: the chat template refuses it.
        """

    @property
    def special_ids(self) -> Container[int]:
        """Tokens that are no text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special ones left out."""


def load(model_path: str) -> Backend:
    """A model's tokenizer. transformers is imported only where nothing else knows what the model's tokenizer does.

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
        """Token ids of ``text``, special tokens added as the model's tokeniser does.

        Raises:
            InvalidArgument: the text is empty.
        """
        if not text:
            raise InvalidArgument("prompt", "empty", "at least one character")
        return tuple(self._backend.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            InvalidArgument: no message, too many, or what the model's chat template refuses.
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
        """For one answer."""
        return Detokenizer(self._backend)


class Detokenizer:
    """Turns an answer's tokens into text one by one, holding back what is not a whole character yet.

    A token's text may depend on its neighbours, so the last few are decoded with each new one: what lies behind the text
    that was shown is new. The pieces together are what decoding all tokens at once gives. (One exception, where a tokeniser
    spells characters in bytes: a byte that breaks off makes it replace the whole characters before, which may be shown.)
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._window: list[int] = []
        # Of the window's text: how much was shown.
        self._shown = ""
        # Tokens since its text last ended in a whole character.
        self._broken = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty if it ends within a character."""
        if token in self._backend.special_ids:
            return ""
        self._window.append(token)
        text = self._backend.decode(self._window)
        end = len(text)
        # A broken character looks like this; so does a token that says it outright, which is merely late then.
        if text.endswith(_BROKEN):
            self._broken += 1
            if self._broken < _CHARACTER_BYTES:
                return ""
            # So many tokens are no beginning of one character any more, save the last ones.
            end -= _CHARACTER_BYTES - 1
        else:
            self._broken = 0
        piece = self._show(text, end)
        if len(self._window) > _WINDOW:
            self._forget(text)
        return piece

    def flush(self) -> str:
        """What was held back, with a replacement character for broken UTF-8."""
        text = self._backend.decode(self._window)
        rest = self._show(text, len(text))
        self._window, self._shown, self._broken = [], "", 0
        return rest

    def _show(self, text: str, end: int) -> str:
        # Text gets shorter where what looked broken was not.
        shown = len(self._shown) if len(self._shown) <= len(text) else _in_common(self._shown, text)
        if end <= shown:
            return ""
        self._shown = text[:end]
        return text[shown:end]

    def _forget(self, text: str) -> None:
        """Keep as few tokens as give the same end of the text: not the very last ones, on which the next may depend."""
        hidden = len(text) - len(self._shown)
        rest = text
        for kept in range(_WINDOW // 2, _WINDOW):
            rest = self._backend.decode(self._window[-kept:])
            if len(rest) > hidden and text.endswith(rest):
                break
        else:
            # Some tokens show nothing: with more of them it might fit.
            if len(self._window) < 4 * _WINDOW:
                return
        self._window = self._window[-kept:]
        self._shown = rest[: max(0, len(rest) - hidden)]


def _in_common(first: str, second: str) -> int:
    """Length of what both begin with."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
