"""The bodies of Ollama's API that are read here, and what is answered, each field declared once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from services.api.http.declared import Declared, Whole
from services.api.http.openai.field_rules import HINTS as OF_OTHER_SERVERS

TEXT_ALONE = "unset: the model reads text alone"
OF_THE_MODEL = "unset: the chat template is the model's"
AS_MESSAGES = "unset: say messages to /api/chat"
_LOADED = "without effect: the model stays loaded"
_OF_MACHINE = "without effect: the server's settings say it"
_SHORTENED = "false, or unset: what the context does not hold is refused"


class CalledWith(Declared):
    """A function and its arguments."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Any = None
    description: Any = None


class SaidCall(Declared):
    """A call of a tool that the assistant has made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledWith


class SaidMessage(Declared):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(None, description=TEXT_ALONE)
    tool_calls: list[SaidCall] | None = None
    tool_name: str | None = Field(None, description="of a tool: the function whose call it answers")
    tool_call_id: str | None = Field(None, description="of a tool: the call that it answers; unset: the first of its name")
    name: Any = None


class Options(Declared):
    """Sampling. What is unset is the model's, not Ollama's."""

    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    seed: Any = None
    num_predict: Whole | None = Field(None, ge=-2, le=1 << 20, description="-1 and -2: what the context leaves")
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repeat_penalty: Any = None
    typical_p: float | None = Field(None, ge=1, le=1, description="named in x-outrider-ignored")
    num_ctx: Whole | None = Field(None, ge=1, description="named in x-outrider-ignored: the context is the model's")
    num_batch: Any = Field(None, description=_OF_MACHINE)
    num_gpu: Any = Field(None, description=_OF_MACHINE)
    main_gpu: Any = Field(None, description=_OF_MACHINE)
    num_thread: Any = Field(None, description=_OF_MACHINE)
    use_mmap: Any = Field(None, description=_OF_MACHINE)
    use_mlock: Any = Field(None, description=_OF_MACHINE)
    low_vram: Any = Field(None, description=_OF_MACHINE)
    numa: Any = Field(None, description=_OF_MACHINE)
    num_keep: Any = Field(None, description="without effect: nothing of a conversation is left out")


class OllamaBody(Declared):
    """What both bodies have."""

    model: str | None = Field(None, description="a name of the model; a :latest behind it is none of it")
    options: dict[str, Any] | None = Field(None, description="sampling, num_predict, stop and seed")
    format: Any = Field(None, description="json, or a JSON schema")
    stream: bool | None = Field(None, description="unset: lines of JSON as the answer is made")
    think: Any = Field(
        None,
        description="true, false or how long: options of the chat template, or named in x-outrider-ignored",
    )
    keep_alive: Any = Field(None, description=_LOADED)
    truncate: Literal[False] | None = Field(None, description=_SHORTENED)
    shift: Literal[False] | None = Field(None, description=_SHORTENED)
    logprobs: Literal[False] | None = Field(None, description="unset: say it to /v1/chat/completions")
    top_logprobs: Literal[0] | None = Field(None, description="unset: say it to /v1/chat/completions")
    speculation: Any = None
    privacy: Any = None
    cache_salt: Any = None


class OllamaChatBody(OllamaBody):
    """A conversation. Without messages it asks whether the model is loaded."""

    messages: list[SaidMessage] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = Field(None, description="as in /v1/chat/completions")


class OllamaGenerateBody(OllamaBody):
    """A prompt, as a user's message or as it is. Without one it asks whether the model is loaded."""

    prompt: str = ""
    suffix: str | None = Field(None, description="the text behind a gap, of models with fill-in-the-middle tokens")
    system: str | None = None
    raw: bool | None = Field(None, description="true: no chat template")
    template: str | None = Field(None, description=OF_THE_MODEL)
    context: list[Any] | None = Field(None, description=AS_MESSAGES)
    images: list[Any] | None = Field(None, description=TEXT_ALONE)


class ShowBody(Declared):
    """Which model is shown."""

    model: str | None = None
    name: str | None = Field(None, description="as model")
    verbose: Any = Field(None, description="without effect")


# What clients always send, and is not there: with server.unknown_fields: refuse, what is said of each.
LEFT_OUT: dict[str, str] = {
    "typical_p": "unset: the model's generation_config may set it",
    "num_ctx": "unset: the model's context is the server's (verifier.max_model_len)",
}
HINTS: dict[str, str] = {
    **OF_OTHER_SERVERS,
    "max_tokens": "unset: say options.num_predict",
    "response_format": "unset: say format",
    **dict.fromkeys(("temperature", "top_p", "top_k", "seed", "stop"), "unset: say it in options"),
    "reasoning_effort": "unset: say think",
    "repeat_last_n": "unset: penalties count all tokens",
}


class ToldFunction(BaseModel):
    """A function that is called."""

    name: str
    arguments: dict[str, Any]


class ToldCall(BaseModel):
    """A call, whole."""

    id: str
    function: ToldFunction


class ToldMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[ToldCall] | None = None


class _Ended(BaseModel):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    metrics: dict[str, Any] | None = None


class OllamaChatReply(_Ended):
    """The answer, or a line of one; counts and times, in nanoseconds, where it is done."""

    message: ToldMessage


class OllamaGenerateReply(_Ended):
    """The answer, or a line of one; counts and times, in nanoseconds, where it is done."""

    response: str
    thinking: str | None = None


class Details(BaseModel):
    """What Ollama tells of a model's files; what is not known here is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(BaseModel):
    """A model by one of its names."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(BaseModel):
    """The served models."""

    models: list[TaggedModel]


class ShownModel(BaseModel):
    """One of them."""

    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaError(BaseModel):
    """Why there is no answer."""

    error: str
