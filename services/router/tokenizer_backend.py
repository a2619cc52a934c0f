"""What a model's tokenizer can do, by whichever library: the port behind ``Tokens`` and ``Detokenizer``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from services.router.named_templates import ChatTemplates


class Backend(Protocol):
    """A tokenizer library with the model's tokenizer and chat template."""

    @property
    def templates(self) -> ChatTemplates:
        """The model's chat templates."""

    def encode(self, text: str, *, special: bool = True) -> Sequence[int]:
        """Ids of ``text``, with the special tokens that the model's tokenizer adds to a text, or without (``special``)."""

    @property
    def longest_token(self) -> int:
        """Most characters of a text that one token stands for."""

    @property
    def special_names(self) -> Mapping[str, int]:
        """Ids of special tokens by their names."""

    def id_of(self, name: str) -> int | None:
        """Id of the token of this name, special or not; None: there is none."""

    @property
    def added_names(self) -> Mapping[str, int]:
        """Ids of all tokens that are found in a text before it is tokenised, by their names; special ones are among them."""

    @property
    def special_ids(self) -> Set[int]:
        """Ids of special tokens, which have no text."""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of ``tokens``, without special tokens, or with their names (``special``)."""

    def spell(self, token: int) -> bytes:
        """What a token adds to a text, in UTF-8; the name of a special one, nothing for an unknown one."""
