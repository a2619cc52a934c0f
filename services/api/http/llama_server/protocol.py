"""The bodies of /completion and /infill and what is answered, each field declared once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, RootModel

from services.api.http.declared import Declared, Whole
from services.api.http.openai.field_rules import HINTS as OF_OTHER_SERVERS
from services.api.http.openai.field_rules import SAMPLERS
from speculation import limits

_LEFT_OUT = "left out, and named in x-outrider-ignored (server.unknown_fields)"


class OtherFile(Declared):
    """A file that is read before the one with the gap."""

    filename: str = "tmp"
    text: str
    time: Any = Field(None, description="without effect")


class LlamaBody(Declared):
    """What both bodies have. Sampling that is unset is the model's, as in /v1/completions."""

    n_predict: Whole | None = Field(
        None, ge=-1, le=limits.MAX_TOKENS, description="-1: what the context leaves; 0: no answer"
    )
    stream: bool | None = None
    seed: Whole | None = Field(None, description="-1: drawn")
    stop: list[str] | None = None
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repeat_penalty: Any = Field(None, description="as repetition_penalty of /v1/completions")
    ignore_eos: Any = None
    return_tokens: bool | None = Field(None, description="tokens: the ids of the answer")
    model: Any = None
    speculation: Any = None
    privacy: Any = None
    cache_salt: Any = None
    cache_prompt: Literal[True] | None = Field(None, description="prompts are cached by themselves")
    id_slot: Whole | None = Field(None, description="without effect: there are no slots to choose")
    response_fields: list[str] | None = Field(None, description="of an answer's end, these alone; a/b is b within a")
    samplers: Any = Field(None, description=_LEFT_OUT)
    typical_p: float | None = Field(None, ge=1, le=1, description=_LEFT_OUT)
    n_indent: Whole | None = Field(None, ge=0, description=_LEFT_OUT)
    t_max_prompt_ms: Whole | None = Field(None, ge=-1, description=_LEFT_OUT)
    t_max_predict_ms: Whole | None = Field(None, ge=-1, description=_LEFT_OUT)


class InfillBody(LlamaBody):
    """A text with a gap."""

    input_prefix: str = Field(description="the text before the gap")
    input_suffix: str = Field(description="the text behind it")
    input_extra: list[OtherFile] | None = None
    prompt: str | None = Field(None, description="behind input_prefix: where the cursor's line begins")


class ContinueBody(LlamaBody):
    """A text to continue."""

    prompt: str | list[Whole] = Field(description="a text, or token ids")
    json_schema: dict[str, Any] | None = Field(None, description="the answer follows it")


# What editors and pages always send, and is not there: with server.unknown_fields: refuse, what is said of each.
LEFT_OUT: dict[str, str] = {
    "samplers": f"unset: {SAMPLERS}",
    "typical_p": "unset: the model's generation_config may set it",
    "n_indent": "unset, or 0: lines are not cut by their indentation",
    "t_max_prompt_ms": "unset, or 0: say n_predict",
    "t_max_predict_ms": "unset, or 0: say n_predict",
}
_ELSEWHERE = "unset: say it to /v1/completions"
# Fields of llama-server and others: what to say instead.
HINTS: dict[str, str] = {
    **OF_OTHER_SERVERS,
    "n_probs": "unset: say logprobs to /v1/completions",
    "post_sampling_probs": "unset: say logprobs to /v1/completions",
    **dict.fromkeys(("logit_bias", "n", "structured_outputs"), _ELSEWHERE),
    "grammar": "unset: say structured_outputs.grammar, as Lark writes it, to /v1/completions",
    "json_schema": "unset: say structured_outputs.json to /v1/completions",
    **dict.fromkeys(("max_tokens", "max_new_tokens", "num_predict"), "unset: say n_predict"),
    **dict.fromkeys(("repetition_penalty", "penalty_last_n", "repeat_last_n"), "unset: say repeat_penalty"),
    "min_new_tokens": _ELSEWHERE,
    "suffix": "unset: say input_suffix to /infill",
}


class LlamaPiece(BaseModel):
    """An event of the answer but its last one."""

    index: Literal[0]
    content: str
    tokens: list[int] | None = None
    stop: Literal[False]


class LlamaReply(BaseModel):
    """The answer, or the last event of one; ``tokens`` where they are asked for, and those of ``response_fields`` alone."""

    index: Literal[0]
    content: str
    tokens: list[int] | None = None
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    seed: int
    timings: dict[str, float]
    metrics: dict[str, Any]


class LlamaEvent(RootModel[LlamaPiece | LlamaReply]):
    """An event of the answer."""
