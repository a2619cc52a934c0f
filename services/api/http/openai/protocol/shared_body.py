"""What the bodies of chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from services.api.http.declared import Declared, Whole
from services.api.http.openai.protocol.marks import NO_EFFECT, OnlyFalse, OnlyTrue, Refused, TokenId
from services.api.http.openai.protocol.parts import (
    Choices,
    Pattern,
    Prediction,
    ResponseFormat,
    Schema,
    Speculation,
    StreamOptions,
    StructuredOutputs,
)
from services.api.messages import MAX_SALT_CHARACTERS
from speculation import limits

MAX_CHOICES = 16
# Characters of a request's name.
MOST_OF_ID = 128
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
TIERS = "there is one tier; the answer says default"
_CACHED = "prompts are cached for each API key by themselves, as long as there is room"
_CACHES = f"unset: {_CACHED}"
_BEAMS = "unset: answers are decoded without beams"


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("-1, or a whole number from 1")
    return value


Kept = Annotated[Whole, AfterValidator(_not_zero)]
StopText = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARACTERS)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=limits.LOGIT_BIAS[0], le=limits.LOGIT_BIAS[1])]
BadWord = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARACTERS, pattern=r"\S")]


def _between(span: tuple[float, float], description: str = "") -> Any:
    return Field(None, ge=span[0], le=span[1], description=description or None)


class SharedBody(Declared):
    """Fields of both bodies."""

    model: str | None = Field(None, max_length=256, description="one of the served names; unset: the first")

    # How tokens are chosen.
    temperature: float | None = Field(
        None, ge=0.0, le=2.0, description=f"below {limits.MIN_TEMPERATURE:g} it is 0, the likeliest token"
    )
    top_p: float | None = _between(limits.TOP_P, "0 keeps the likeliest token alone")
    top_k: Whole | None = Field(None, ge=-1, le=limits.TOP_K[1], description="-1 and 0: all")
    min_p: float | None = _between(limits.MIN_P, "drops tokens below this share of the likeliest one's probability")
    presence_penalty: float | None = _between(limits.PRESENCE_PENALTY, "taken from the logit of each token of the answer")
    frequency_penalty: float | None = _between(
        limits.FREQUENCY_PENALTY, "taken for every time that the answer has the token"
    )
    repetition_penalty: float | None = _between(limits.REPETITION_PENALTY, "of the prompt's tokens, too")
    logit_bias: dict[TokenKey, Bias] | None = Field(
        None, max_length=limits.MAX_LOGIT_BIAS, description="token ids to numbers that are added to their logits"
    )
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, description="only these tokens are chosen")
    bad_words: list[BadWord] | None = Field(
        None, max_length=limits.MAX_BAD_WORDS, description="texts that the answer does not hold"
    )
    seed: Whole | None = Field(
        None,
        ge=-(2**63),
        le=limits.MAX_UINT64,
        description="the same seed, the same answer; unset: drawn, and told in the answer",
    )
    ignore_generation_config: bool | None = Field(None, description="of the model, but its end-of-text tokens")
    response_format: ResponseFormat | None = Field(None, description="the form that the answer must have")
    structured_outputs: StructuredOutputs | None = Field(None, description="the form that the answer must have, as in vLLM")
    guided_json: Schema | Pattern | None = Field(None, description="as structured_outputs.json")
    guided_json_object: bool | None = Field(None, description="as structured_outputs.json_object")
    guided_regex: Pattern | None = Field(None, description="as structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="as structured_outputs.choice")
    guided_grammar: Pattern | None = Field(None, description="as structured_outputs.grammar")

    # Where the answer ends, and how many there are.
    n: Whole | None = Field(None, ge=1, le=MAX_CHOICES, description="the next choice has the next seed")
    min_tokens: Whole | None = Field(
        None, ge=0, le=limits.MAX_TOKENS, description="no stop token is chosen before so many; at most max_tokens"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=limits.MAX_STOP_STRINGS)] | None = Field(
        None, description="texts; the name of a special token ends the answer at that token"
    )
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=limits.MAX_STOP_TOKENS, description="tokens that end the answer, besides the model's own"
    )
    ignore_eos: bool | None = Field(None, description="go on past the model's own end-of-text tokens")
    include_stop_str_in_output: bool | None = Field(None, description="the text ends with what ended it")

    # How it is drafted.
    prediction: Prediction | None = Field(None, description="drafted from")
    speculation: Speculation | None = None

    # What is told of it, and how.
    stream: bool | None = Field(None, description="the answer comes in events as it is made")
    stream_options: StreamOptions | None = Field(None, description="without effect where stream is not true")
    stream_interval: Whole | None = Field(None, ge=1, le=4096, description="tokens in an event; unset: those of a pass")
    prompt_logprobs: Whole | None = Field(
        None, ge=0, le=limits.MAX_LOGPROBS, description="of whole answers; the prompt is then computed from its beginning"
    )
    skip_special_tokens: bool | None = Field(None, description="false: the text has the names of special tokens")
    return_token_ids: bool | None = Field(None, description="answers have token ids as well")
    return_tokens_as_token_ids: bool | None = Field(None, description='log-probabilities name tokens as "token_id:17"')
    request_id: str | None = Field(
        None, max_length=MOST_OF_ID, pattern=r"^[ -~]+$", description="the answer's name, in printable ASCII"
    )

    # How it is served.
    truncate_prompt_tokens: Kept | None = Field(
        None, ge=-1, le=limits.MAX_TOKENS, description="keep so many tokens of the prompt; -1: as many as fit; not 0"
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="which side is cut off; unset: left")
    privacy: Literal["none", "strict"] | None = Field(None, description="strict: what is sent tells nothing of the drafts")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT_CHARACTERS,
        description="shares computed prompts with requests of the same salt",
    )
    priority: Whole | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower ones go first among the same key's requests"
    )

    # What cannot change an answer.
    user: Annotated[str | None, NO_EFFECT] = Field(None, description="a text")
    safety_identifier: Annotated[str | None, NO_EFFECT] = Field(None, description="a text")
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, NO_EFFECT
    ] = Field(
        None,
        max_length=16,
        description="an object of at most 16 texts of at most 512 characters, which the router's rules may ask for",
    )
    prompt_cache_key: Annotated[str | None, NO_EFFECT] = Field(None, description="a text")
    service_tier: Annotated[ServiceTier | None, NO_EFFECT] = Field(None, description=TIERS)
    store: Annotated[OnlyFalse | None, NO_EFFECT] = Field(None, description="false: answers are not stored")
    cache_prompt: Annotated[OnlyTrue | None, NO_EFFECT] = Field(None, description=_CACHES)
    prompt_cache_retention: Annotated[Literal["in_memory", "in-memory", "24h"] | None, NO_EFFECT] = Field(
        None, description=_CACHED
    )
    prompt_cache_options: Annotated[dict[str, Any] | None, NO_EFFECT] = Field(None, description=_CACHED)
    spaces_between_special_tokens: Annotated[OnlyTrue | None, NO_EFFECT] = Field(
        None, description="true: the tokenizer alone decides on spaces"
    )
    guided_decoding_backend: Annotated[str | None, NO_EFFECT] = Field(None, description="a text")
    # What is not served; a value that asks for nothing is accepted.
    use_beam_search: Annotated[OnlyFalse | None, NO_EFFECT] = Field(None, description=_BEAMS)
    length_penalty: Annotated[float | None, NO_EFFECT] = Field(None, ge=1.0, le=1.0, description=_BEAMS)
    logits_processors: Annotated[list[Any] | None, NO_EFFECT] = Field(
        None, max_length=0, description="unset: programs are not taken from requests"
    )
    moderation: Refused = Field(None, description="unset: answers are not moderated")
    kv_transfer_params: Refused = Field(None, description="unset: caches are not moved between servers")
    mm_processor_kwargs: Refused = Field(None, description="unset: the model reads text alone")
    repetition_detection: Refused = Field(None, description="unset: say repetition_penalty")
    vllm_xargs: Refused = Field(None, description="unset: there are no such arguments")
