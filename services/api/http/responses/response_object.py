"""What the Responses API answers, as it is declared."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
FailureCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
_Progress = Literal["in_progress", "completed", "incomplete"]


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class OutputText(_Told):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(_Told):
    """What the model says."""

    type: Literal["message"]
    id: str
    status: _Progress
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(_Told):
    """A call of a function: the arguments are the model's own text."""

    type: Literal["function_call"]
    id: str
    status: _Progress
    call_id: str
    name: str
    arguments: str


class OutputNamespacedCall(OutputCall):
    """A call of a function in a namespace."""

    namespace: str


class OutputTextCall(_Told):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    id: str
    status: _Progress
    call_id: str
    name: str
    input: str


class OutputNamespacedTextCall(OutputTextCall):
    """A call of such a tool in a namespace."""

    namespace: str


class Thought(_Told):
    """What the model thinks."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(_Told):
    """What the model thinks before it answers. There are no summaries."""

    type: Literal["reasoning"]
    id: str
    status: _Progress
    summary: list[Any]
    content: list[Thought]


class InputDetails(_Told):
    """Of the tokens of a prompt."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputDetails(BaseModel):
    """Of the tokens of an answer; of a prediction's, there are accepted_prediction_tokens and rejected ones, too."""

    model_config = ConfigDict(extra="allow", strict=True)

    reasoning_tokens: int


class ResponseUsage(_Told):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(_Told):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(_Told):
    """Why an answer failed."""

    code: FailureCode
    message: str


class ResponseObject(BaseModel):
    """A response. One that has ended has, besides, ``seed``, ``stop_reason``, ``metrics`` and what else it was asked for."""

    model_config = ConfigDict(extra="allow", strict=True)

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[
        OutputMessage | OutputCall | OutputNamespacedCall | OutputTextCall | OutputNamespacedTextCall | OutputReasoning
    ]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: Literal["default"] | None = None
    store: bool
    system_fingerprint: str
    temperature: float
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(_Told):
    """The answer to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(_Told):
    """The answer to POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputItems(_Told):
    """The answer to GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(BaseModel):
    """An event of an answer; its name is its type, and what else it has is as in OpenAI's API."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
