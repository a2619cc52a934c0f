"""What a client sends to the Responses API, as it is declared. What is not here is refused (``unserved``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field

from services.api.http.declared import Declared, Whole
from services.api.http.openai.protocol.shared_body import TIERS, ServiceTier
from services.api.http.responses.item_protocol import InputItem, Later
from services.api.http.responses.tool_protocol import ChosenFunction, ChosenTools, FunctionTool, Namespace, TextTool


class TextFormat(Declared):
    """The form of the answer's text; all but ``type`` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(Declared):
    """``text`` of a request."""

    format: Annotated[Any, Later(TextFormat)] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Declared):
    """``reasoning`` of a request. Thoughts are told whole, so that a summary adds nothing, however detailed."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamedHow(Declared):
    """``stream_options`` of a request."""

    include_obfuscation: bool | None = None


LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    # Thoughts are told plainly.
    "reasoning.encrypted_content",
    # Of items that are never there.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class Extensions(Declared):
    """Fields beyond OpenAI's, as the chat door reads them."""

    seed: Annotated[Any, Later(int)] = Field(
        None, description="the same seed, the same answer; unset: drawn, and told in the answer"
    )
    top_k: Annotated[Any, Later(int)] = None
    min_p: Annotated[Any, Later(float)] = None
    presence_penalty: Annotated[Any, Later(float)] = None
    frequency_penalty: Annotated[Any, Later(float)] = None
    repetition_penalty: Annotated[Any, Later(float)] = None
    logit_bias: Annotated[Any, Later(dict[str, float])] = None
    min_tokens: Annotated[Any, Later(int)] = None
    stop: Annotated[Any, Later(str | list[str])] = None
    stop_token_ids: Annotated[Any, Later(list[int])] = None
    include_stop_str_in_output: Annotated[Any, Later(bool)] = None
    ignore_eos: Annotated[Any, Later(bool)] = None
    bad_words: Annotated[Any, Later(list[str])] = None
    allowed_token_ids: Annotated[Any, Later(list[int])] = None
    skip_special_tokens: Annotated[Any, Later(bool)] = None
    ignore_generation_config: Annotated[Any, Later(bool)] = None
    structured_outputs: Annotated[Any, Later(dict[str, Any])] = None
    stream_interval: Annotated[Any, Later(int)] = None
    prediction: Annotated[Any, Later(dict[str, Any])] = None
    speculation: Annotated[Any, Later(dict[str, Any])] = Field(
        None, description="strategy, num_speculative_tokens, acceptance, report, compare"
    )
    chat_template_kwargs: Annotated[Any, Later(dict[str, Any])] = None
    thinking_token_budget: Annotated[Any, Later(int)] = None
    privacy: Annotated[Any, Later(Literal["none", "strict"])] = None
    cache_salt: Annotated[Any, Later(str)] = None
    priority: Annotated[Any, Later(int)] = None
    return_token_ids: Annotated[Any, Later(bool)] = None
    return_tokens_as_token_ids: Annotated[Any, Later(bool)] = None
    request_id: Annotated[Any, Later(str)] = None


class CreateResponse(Extensions):
    """The body of POST /v1/responses."""

    model: Annotated[Any, Later(str)] = Field(None, description="one of the served names; unset: the first")
    input: Annotated[Any, Later(str | list[InputItem])] = Field(
        description="a text, or items: message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output, reasoning, item_reference"
    )
    instructions: str | None = Field(None, description="the system's message; not handed on to what follows an answer")
    previous_response_id: str | None = Field(
        None, description="an answer that is stored for the same tenant, whose conversation goes on"
    )
    store: bool | None = Field(
        None, description="unset: as if true, where answers are stored (server.stored_responses); private ones never are"
    )
    stream: bool | None = None
    stream_options: StreamedHow | None = None
    max_output_tokens: Annotated[Any, Later(int)] = Field(None, description="unset: as many as the context leaves")
    max_tool_calls: Annotated[Whole, Ge(1)] | None = Field(
        None, description="without effect: it counts calls of built-in tools, of which there are none"
    )
    temperature: Annotated[Any, Later(float)] = Field(None, description="0 to 2; below 0.001 it is 0, the likeliest token")
    top_p: Annotated[Any, Later(float)] = None
    top_logprobs: Annotated[Any, Later(int)] = Field(None, description="0 to 20; with or without include")
    include: list[Includable] | None = Field(
        None,
        description="log-probabilities of the text; other values ask for what is never there, or is told anyway",
    )
    tools: Annotated[Any, Later(list[FunctionTool | TextTool | Namespace])] = Field(
        None,
        description="functions (unset strict: not strict), custom tools of any text, namespaces of both; beside them, "
        "built-in tools are left out and named in x-outrider-ignored (server.unknown_fields)",
    )
    tool_choice: Annotated[Any, Later(Literal["none", "auto", "required"] | ChosenFunction | ChosenTools)] = Field(
        None,
        description="object: a function, which is called; or allowed_tools: the model is shown all tools and calls some",
    )
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = Field(
        None,
        description="format: text, json_object, json_schema; a schema is always followed. verbosity: low and high as an "
        "option of the chat template, if it reads it",
    )
    reasoning: ReasoningConfig | None = Field(
        None,
        description="effort: for chat templates that read it, or whether the model thinks; summary: thoughts are told whole",
    )
    truncation: Literal["disabled", "auto"] | None = Field(
        None, description="auto: of a conversation that is too long, the oldest turns are left out"
    )
    metadata: Annotated[Any, Later(dict[str, str])] = None
    user: Annotated[Any, Later(str)] = None
    safety_identifier: Annotated[Any, Later(str)] = None
    prompt_cache_key: Annotated[Any, Later(str)] = None
    prompt_cache_retention: Annotated[Any, Later(Literal["in_memory", "24h"])] = None
    prompt_cache_options: Annotated[Any, Later(dict[str, Any])] = None
    service_tier: Annotated[Any, Later(ServiceTier)] = Field(None, description=TIERS)
    client_metadata: dict[str, Any] | None = Field(None, description="without effect")


# Fields that are called and read as at the chat door.
AS_IN_CHAT = (
    *Extensions.model_fields,
    "model", "temperature", "top_p", "parallel_tool_calls", "metadata", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "service_tier",
)  # fmt: skip
