"""Turns the tokens of an answer under way into text, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence

from services.router.tokenizer_backend import Backend

# What an incomplete character decodes to.
_BROKEN = "\ufffd"
# Bytes of the longest character in UTF-8.
_CHARACTER_BYTES = 4
# Each new token is decoded together with its predecessors. Their number is cut to about half of this when it exceeds it.
_WINDOW = 16


class Detokenizer:
    """Turns an answer's tokens into text one by one, and holds back incomplete characters.

    A token's text may depend on its neighbours, so the last few tokens are decoded together with each new one. Whatever
    follows the text already shown is new. Together the pieces equal the text of all tokens decoded at once. (One exception:
    where a tokeniser spells characters in bytes, an incomplete one makes it replace the whole characters before it as well,
    which may have been shown already.)
    """

    def __init__(
        self, backend: Backend, *, special: bool = False, after: Sequence[int] = (), hidden: Sequence[int] = ()
    ) -> None:
        also = backend.special_ids | {*hidden} if hidden else backend.special_ids
        self._hidden: Container[int] = () if special else also
        self._decode = functools.partial(backend.decode, special=True) if special else backend.decode
        self._window: list[int] = []
        # The part of the window's text that was shown.
        self._shown = ""
        # Tokens since the window's text last ended in a whole character.
        self._broken = 0
        self._begin(after)

    def _begin(self, after: Sequence[int]) -> None:
        """Fill the window with the end of the text before, from a whole character on; its last one may be incomplete."""
        seen = [token for token in after[-4 * _WINDOW :] if token not in self._hidden]
        for size in range(_WINDOW // 2, _WINDOW // 2 + _CHARACTER_BYTES):
            self._window = seen[-size:]
            text = self._decode(self._window)
            if not text.startswith(_BROKEN):
                break
        self._shown = text.rstrip(_BROKEN) if text else ""
        self._broken = min(len(text) - len(self._shown), _CHARACTER_BYTES - 1)

    @property
    def incomplete(self) -> bool:
        """Whether text is held back: the tokens so far end within a character, or look so."""
        return self._broken > 0

    def push(self, token: int) -> str:
        """The new text after ``token``; empty if the text ends within a character."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
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
        text = self._decode(self._window)
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
            rest = self._decode(self._window[-kept:])
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
