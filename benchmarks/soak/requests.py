"""What users of the soak ask: prompts, sampling and lengths of many kinds, each with one right answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outrider
from benchmarks.bench.prompts import BUILTIN, read_prompts
from services.router.tokens import Tokens

# Each with a seed, so that an answer is the same whoever drafts for it.
SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    # Said, because gRPC's and HTTP's defaults differ.
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"structured_outputs": {"regex": "([a-m]{1,9} ){30}"}, "temperature": 1.0},
)
_PROMPT_TOKENS = (8, 60, 200)
_ANSWER_TOKENS = (8, 40, 120)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRequest:
    """A question that has one right answer.

    Attributes:
        options: everything that the answer depends on beside the prompt, as in ``outrider.AsyncClient.generate``.
    """

    name: str
    token_ids: tuple[int, ...]
    options: Mapping[str, Any] = field(hash=False)


def made_requests(model: Path, seed: int, count: int) -> list[SoakRequest]:
    """So many requests for the model; a seed gives the same ones."""
    source, tokens = random.Random(seed), Tokens(str(model))
    texts = [prompt.turns[0] for prompt in read_prompts(BUILTIN)]
    made = []
    for number in range(count):
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        ids = tokens.encode(source.choice(texts))[: source.choice(_PROMPT_TOKENS)]
        options = {**sampling, "seed": source.randrange(1 << 31), "max_tokens": source.choice(_ANSWER_TOKENS)}
        if "structured_outputs" not in sampling:
            options["ignore_eos"] = True
        made.append(SoakRequest(name=f"request {number}", token_ids=ids, options=options))
    return made


async def plain_answers(client: outrider.AsyncClient, requests: Sequence[SoakRequest]) -> dict[str, tuple[int, ...]]:
    """What plain decoding answers, by the requests' names: asked one after the other, of a service without faults."""
    found = {}
    for request in requests:
        options: Any = {**request.options, "strategy": "autoregressive"}
        found[request.name] = (await client.generate(token_ids=request.token_ids, **options)).token_ids
    return found
