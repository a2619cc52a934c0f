"""Text to token ids, and back one token at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from jinja2 import TemplateError

from services.router.tokenizer_file import open_file
from speculation import limits
from speculation.errors import InvalidArgument
from speculation.messages import ChatMessage


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

    A few tokens before the new ones are decoded with them, since a token's text may depend on its neighbours: what the
    longer decoding has beyond the shorter one is new.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._window: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty if it ends within a character."""
        self._window.append(token)
        before = self._backend.decode(self._window[: self._shown])
        text = self._backend.decode(self._window)
        # A broken character looks like this; so does a token that says it outright, which is merely late then.
        if text.endswith("\ufffd") or len(text) <= len(before):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        """What was held back, with a replacement character for broken UTF-8."""
        whole, shown = self._backend.decode(self._window), self._backend.decode(self._window[: self._shown])
        rest = whole[len(shown) :]
        self._window, self._shown = [], 0
        return rest
