"""Converts text and conversations to token ids, and ids back to text (those of an answer under way: ``detokenizer``)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from jinja2 import TemplateError

from services.api.messages import ChatMessage, ChatOptions, Infill, TokenSpelling
from services.logs.printable import printable_line
from services.router.conversations import Conversations
from services.router.detokenizer import Detokenizer
from services.router.infill import InfillTokens, infill_tokens
from services.router.tokenizer_backend import Backend
from services.router.tokenizer_file import open_file
from speculation.errors import InvalidArgument, PromptTooLong
from speculation.room import room_behind

_NO_OPTIONS = ChatOptions()
# A character that is never one token with what follows it (as in CodeLlama's own ``encode_infilling``).
_AHEAD = "☺"
# Characters of a template's own error that are shown.
_SAID = 200

Source: TypeAlias = "str | tuple[ChatMessage, ...] | tuple[int, ...]"


def length_of(source: Source) -> int:
    """Characters of a text or a conversation; the number of token ids."""
    if isinstance(source, str) or _is_ids(source):
        return len(source)
    return sum(_length(entry) for entry in source if isinstance(entry, ChatMessage))


def _is_ids(source: Source) -> bool:
    # All entries are of one kind: millions of ids are not looked at one by one.
    return not isinstance(source, str) and (not source or isinstance(source[0], int))


def _length(message: ChatMessage) -> int:
    return len(message.role) + len(message.content) + len(message.name) + len(message.tool_calls) + len(message.reasoning)


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

    Args:
        generic_tools, thoughts: as in ``RouterConfig``.

    Raises:
        ConfigurationError: the tokeniser cannot be loaded, or is not a fast one.

    Attributes:
        conversations: renders them, and says what their templates read.
    """

    def __init__(self, model_path: str, *, generic_tools: bool = True, thoughts: bool = True) -> None:
        self._backend = load(model_path)
        added = self._backend.added_names
        self.conversations = Conversations(self._backend.templates, generic=generic_tools, thoughts=thoughts, added=added)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return bool(self._backend.templates)

    @property
    def special_names(self) -> Mapping[str, int]:
        """Ids of tokens that have no text, by their names."""
        return self._backend.special_names

    @property
    def added_names(self) -> Mapping[str, int]:
        """Ids of all tokens that are marks, by their names."""
        return self._backend.added_names

    def check_length(self, source: Source, most_tokens: int, field: str = "prompt") -> None:
        """Refuse a text that has too many tokens however it is cut, before it is tokenised, which takes long.

        Args:
            field: of the request, which holds it.

        Raises:
            PromptTooLong: it has at least ``most_tokens`` tokens.
        """
        length, most = length_of(source), most_tokens * self._backend.longest_token
        if _is_ids(source):
            room_behind(length, most_tokens, field)
        elif length > most:
            allowed = f"at most {most} characters (this model's maximum context length is {most_tokens} tokens)"
            raise PromptTooLong(field, f"{length} characters", allowed)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``, with the special tokens that the model's tokeniser adds, or without (``special``).

        Raises:
            InvalidArgument: the text is empty.
        """
        if not text:
            raise InvalidArgument("prompt", "empty", "at least one character")
        return tuple(self._backend.encode(text, special=special))

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text`` as part of an answer: without special tokens."""
        return tuple(self._backend.encode(text, special=False))

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of words as parts of an answer: at its beginning, and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(ids for text in texts if (ids := self.encode_answer(text))))

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = _NO_OPTIONS) -> tuple[int, ...]:
        """Token ids of a conversation, up to the beginning of the assistant's answer.

        Raises:
            InvalidArgument: no messages, too many, a message without a role, what the model's chat template does not read or
                refuses, or there is none.
        """
        try:
            text = self.conversations.render(messages, options)
        except TemplateError as error:
            said = printable_line(str(error), _SAID)
            raise InvalidArgument("messages", "a conversation", f"what the chat template allows: {said}") from error
        # The template writes the special tokens itself.
        return tuple(self._backend.encode(text, special=False))

    @functools.cached_property
    def infill(self) -> InfillTokens | None:
        """The tokens that mark a gap to be filled; None: the model has none."""
        return infill_tokens(self._backend.id_of)

    def encode_infill(self, before: str, infill: Infill) -> tuple[int, ...]:
        """Token ids of the text before a gap and of what stands around it.

        Raises:
            InvalidArgument: the model has no tokens for that.
        """
        if self.infill is None:
            allowed = "unset: this model's tokenizer has no fill-in-the-middle tokens"
            raise InvalidArgument("suffix", "set", allowed)
        return (*self._before_texts, *self.infill.prompt(before, infill, self._inner))

    @functools.cached_property
    def _before_texts(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a text."""
        whole, bare = tuple(self._backend.encode("a")), tuple(self._backend.encode("a", special=False))
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), ())

    def _inner(self, text: str) -> Sequence[int]:
        """Token ids of a text within another: without the space that some tokenizers put before a text."""
        if not text:
            return ()
        ahead = tuple(self._backend.encode(_AHEAD, special=False))
        ids = tuple(self._backend.encode(_AHEAD + text, special=False))
        puts_space = self._backend.spell(ahead[0]).startswith(b" ")
        apart = ids[: len(ahead)] == ahead
        return ids[len(ahead) :] if puts_space and apart else tuple(self._backend.encode(text, special=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, with the names of special tokens."""
        return self._backend.decode(tokens, special=True)

    def spell(self, tokens: Sequence[int]) -> tuple[TokenSpelling, ...]:
        """What each token adds to a text."""
        return tuple(
            TokenSpelling(data=self._backend.spell(token), special=token in self._backend.special_ids) for token in tokens
        )

    def texts(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Each token's text by itself; a part of a character is replaced by the character for broken ones."""
        return tuple(self._backend.spell(token).decode(errors="replace") for token in tokens)

    def named(self, names: Sequence[str]) -> dict[int, str]:
        """Those of some texts that are names of special tokens, by their ids."""
        return {self._backend.special_names[name]: name for name in names if name in self._backend.special_names}

    @property
    def end_of_turn(self) -> int | None:
        """The token that the tokenizer says ends a text; None: it says none."""
        return self._backend.special_names.get(self._backend.templates.tokens.get("eos_token", ""))

    def detokenizer(self, *, special: bool = False, after: Sequence[int] = (), hidden: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer, for one answer.

        Args:
            special: its text has the names of special tokens.
            after: the tokens whose text the answer's continues; none: its text begins anew.
            hidden: tokens that have no text either, unless ``special``.
        """
        return Detokenizer(self._backend, special=special, after=after, hidden=hidden)
