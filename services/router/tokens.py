"""Text to token ids, and back one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument
from speculation.messages import ChatMessage


class Tokens:
    """A model's tokeniser and chat template.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, or is not a fast one.
    """

    def __init__(self, model_path: str) -> None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot load the tokeniser at {model_path}: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigurationError(f"the tokeniser at {model_path} has no tokenizer.json; convert it to a fast tokeniser")
        self._tokenizer: PreTrainedTokenizerFast = tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, special tokens added as the model's tokeniser does.

        Raises:
            InvalidArgument: the text is empty.
        """
        if not text:
            raise InvalidArgument("prompt", "empty", "at least one character")
        return tuple(self._tokenizer(text)["input_ids"])

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
            encoded: Any = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise InvalidArgument("messages", "a conversation", f"what the chat template allows: {error}") from error
        return tuple(encoded["input_ids"])

    def detokenizer(self) -> Detokenizer:
        """For one answer."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Turns an answer's tokens into text one by one, holding back what is not a whole character yet.

    A few tokens before the new ones are decoded with them, since a token's text may depend on its neighbours: what the
    longer decoding has beyond the shorter one is new.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty if it ends within a character."""
        self._window.append(token)
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        # A broken character looks like this; so does a token that says it outright, which is merely late then.
        if text.endswith("\ufffd") or len(text) <= len(before):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]

    def flush(self) -> str:
        """What was held back, with a replacement character for broken UTF-8."""
        rest = self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]
        self._window, self._shown = [], 0
        return rest

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
