"""Log-probabilities in the two forms of OpenAI's API. The bytes of all tokens together are the answer's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from services.api.http.openai.choice_text import TextToken
from services.api.messages import RouterPort, TokenSpelling
from services.in_turns import in_turns

# For tokens that cannot be chosen; JSON has no infinity.
LEAST = -9999.0


class Speller:
    """Names tokens. A special one, which has no part in the text, has no bytes.

    Args:
        as_ids: name them as "token_id:17".
    """

    def __init__(self, router: RouterPort, *, as_ids: bool) -> None:
        self._router = router
        self._as_ids = as_ids
        self._known: dict[int, TokenSpelling] = {}

    async def learn(self, tokens: Iterable[TextToken]) -> None:
        """Look up the spelling of tokens and of their alternatives."""
        asked = [(token.id, *(token.logprobs.top_ids if token.logprobs else ())) for token in tokens]
        await self.learn_ids(id for ids in asked for id in ids)

    async def learn_ids(self, ids: Iterable[int]) -> None:
        """Look up the spelling of tokens."""
        unknown = sorted({*ids} - self._known.keys())
        if unknown:
            self._known |= dict(zip(unknown, await self._router.spell(unknown), strict=True))

    def data(self, token: int, *, first: bool) -> bytes | None:
        """What a token adds to a text, perhaps a part of a character; None for a special token.

        Args:
            first: it begins an answer, from which the tokenizer drops a leading space.
        """
        spelling = self._known[token]
        if spelling.special:
            return None
        return spelling.data.removeprefix(b" ") if first else spelling.data

    def spelling(self, token: int, *, named: bool) -> bytes:
        """What a token adds to a text that has the names of special tokens (``named``), or not."""
        spelling = self._known[token]
        return b"" if spelling.special and not named else spelling.data

    def name(self, token: int, *, first: bool = False) -> str:
        """A token's text; parts of characters are spelt as OpenAI does."""
        if self._as_ids:
            return f"token_id:{token}"
        data = self.data(token, first=first)
        if data is None:
            return self._known[token].data.decode(errors="replace")
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def drops_space(self, token: TextToken) -> bool:
        """Whether this is an answer's first token and its text lacks the space that the token has elsewhere."""
        data = self._known[token.id].data
        return token.start == 0 and token.text != "" and data == b" " + token.text.encode()


async def chat_logprobs(tokens: Sequence[TextToken], speller: Speller) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    content: list[dict[str, Any]] = []
    async for part in in_turns(tokens):
        await speller.learn(part)
        content += _chat_entries(part, speller)
    return {"content": content, "refusal": None}


def _chat_entries(tokens: Sequence[TextToken], speller: Speller) -> list[dict[str, Any]]:
    content = []
    for token in tokens:
        if token.logprobs is None or not token.shown:
            continue
        first = speller.drops_space(token)
        top = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        content.append(
            {
                **_entry(token.id, token.logprobs.logprob, speller, first=first),
                "top_logprobs": [_entry(id, logprob, speller, first=first) for id, logprob in top],
            }
        )
    return content


def _entry(token: int, logprob: float, speller: Speller, *, first: bool) -> dict[str, Any]:
    data = speller.data(token, first=first)
    return {
        "token": speller.name(token, first=first),
        "logprob": max(logprob, LEAST),
        "bytes": None if data is None else list(data),
    }


async def completion_logprobs(tokens: Sequence[TextToken], speller: Speller, offset: int = 0) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion. The chosen token is among the likeliest ones, as at OpenAI.

    Args:
        offset: characters before the answer.
    """
    form: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    async for part in in_turns(tokens):
        await speller.learn(part)
        _add_completion_entries(form, part, speller, offset)
    return form


def _add_completion_entries(form: dict[str, list[Any]], tokens: Sequence[TextToken], speller: Speller, offset: int) -> None:
    for token in tokens:
        if token.logprobs is None or not token.shown:
            continue
        first = speller.drops_space(token)
        name, logprob = speller.name(token.id, first=first), max(token.logprobs.logprob, LEAST)
        top = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        form["tokens"].append(name)
        form["token_logprobs"].append(logprob)
        form["top_logprobs"].append(
            {speller.name(id, first=first): max(value, LEAST) for id, value in top} | {name: logprob}
        )
        form["text_offset"].append(offset + token.start)
