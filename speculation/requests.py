"""What a request says of sampling, and what its model says where the request does not.

Only here may a value be unset. The router joins the two to ``SamplingParams``, once, before anything else sees the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from speculation.types import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedSampling:
    """``SamplingParams`` as a user sends it: None, or empty, is unset.

    ``ignore_generation_config``: nothing of the model's generation config counts but its end-of-text tokens.

    Raises:
        InvalidArgument: a value is outside its range; names the field.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_generation_config: bool | None = None

    def __post_init__(self) -> None:
        # How long the answer may get where nobody says is not known yet.
        SamplingParams(**{"max_tokens": 2**31 - 1, **self.given})

    @property
    def given(self) -> dict[str, Any]:
        """What is set, by name."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ((), {})}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """What a model's generation config says for requests that leave it open. None, or empty: nothing.

    ``max_length`` and ``min_length`` count the prompt as well; ``max_tokens`` and ``min_tokens`` go before them.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    max_length: int | None = None
    min_length: int | None = None
    stop: tuple[str, ...] = ()
