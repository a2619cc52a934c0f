"""What a rule may ask of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from services.api.messages import ClientRequest
from speculation.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A request as rules see it.

    Attributes:
        tenant, key: whose it is, and the name of the key; empty: the server asks for none.
        model: the name by which the request calls the model, or its first one.
        prompt_tokens: length of the prompt.
        sampled: the temperature is above 0, with the model's defaults.
        grammar, prediction, tools: whether it has them.
        open_requests: those that this router answers, this one included.
        at: the time, with its zone.
        headers, metadata, system_prompt: as in ``HowAsked``.
    """

    tenant: str
    key: str
    model: str
    prompt_tokens: int
    sampled: bool
    grammar: bool
    prediction: bool
    tools: bool
    open_requests: int
    at: datetime
    headers: Mapping[str, str]
    metadata: Mapping[str, str]
    system_prompt: str


def facts_of(
    request: ClientRequest,
    *,
    model: str,
    prompt_tokens: int,
    sampling: SamplingParams,
    open_requests: int,
    at: datetime,
) -> Facts:
    """What rules may ask of a request whose prompt and sampling parameters are complete."""
    how = request.how
    return Facts(
        tenant=request.tenant or "",
        key=how.key,
        model=request.model or model,
        prompt_tokens=prompt_tokens,
        sampled=sampling.temperature > 0,
        grammar=sampling.structured_outputs is not None,
        prediction=bool(request.prediction),
        tools=how.tools,
        open_requests=open_requests,
        at=at,
        headers=how.headers,
        metadata=how.metadata,
        system_prompt=how.system_prompt,
    )
