"""Log-probabilities of a prompt's own tokens: before those of an echoed answer, as OpenAI has them, and alone, as vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.api.http.openai.logprobs import LEAST, Speller
from services.in_turns import in_turns
from speculation.types import TokenLogprobs

_CONTINUES, _OF_CONTINUATION = 0xC0, 0x80


async def echoed_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenLogprobs], text: str, top: int, speller: Speller, *, named: bool
) -> dict[str, Any]:
    """``logprobs`` of a text completion's echoed prompt. There is none of its first token.

    Args:
        scores: of the tokens behind the first.
        text: what is echoed.
        top: how many likeliest tokens are told.
        named: the text has the names of special tokens.
    """
    form: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [None], "top_logprobs": [None], "text_offset": []}
    # Characters of the text before a token.
    end = 0
    async for tokens in in_turns(prompt):
        await speller.learn_ids(tokens)
        for token in tokens:
            form["tokens"].append(speller.name(token))
            form["text_offset"].append(min(end, len(text)))
            data = speller.spelling(token, named=named)
            if end == 0 and data.startswith(b" ") and not text.startswith(" "):
                # The tokenizer drops the space that a text begins with.
                data = data[1:]
            end += sum(byte & _CONTINUES != _OF_CONTINUATION for byte in data)
    async for part in in_turns(scores):
        await speller.learn_ids(_ids_of(part, top))
        for score in part:
            logprob = max(score.logprob, LEAST)
            likeliest = zip(score.top_ids[:top], score.top_logprobs[:top], strict=True)
            form["token_logprobs"].append(logprob)
            named_top = {speller.name(id): max(value, LEAST) for id, value in likeliest}
            form["top_logprobs"].append(named_top | {speller.name(score.token_id): logprob})
    return form


def _ids_of(scores: Sequence[TokenLogprobs], top: int) -> list[int]:
    return [id for score in scores for id in (score.token_id, *score.top_ids[:top])]


async def prompt_logprobs(
    scores: Sequence[TokenLogprobs], top: int, speller: Speller
) -> list[dict[str, dict[str, Any]] | None]:
    """``prompt_logprobs`` of an answer: none of the first token, then by token id, with ``rank`` among the likeliest."""
    found: list[dict[str, dict[str, Any]] | None] = [None]
    async for part in in_turns(scores):
        await speller.learn_ids(_ids_of(part, top))
        for score in part:
            ids = score.top_ids[:top]
            entries = {id: (value, rank + 1) for rank, (id, value) in enumerate(zip(ids, score.top_logprobs, strict=False))}
            own = entries.get(score.token_id, (score.logprob, None))
            found.append(
                {
                    str(id): {"logprob": max(value, LEAST), "rank": rank, "decoded_token": speller.name(id)}
                    for id, (value, rank) in {score.token_id: own, **entries}.items()
                }
            )
    return found
