"""What each path takes and answers, declared once for /openapi.json and /docs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from services.api.http.llama_server.protocol import ContinueBody, InfillBody, LlamaEvent, LlamaReply
from services.api.http.messages import protocol as messages
from services.api.http.messages import replies
from services.api.http.ollama import protocol as ollama
from services.api.http.openai.protocol import answers, service_answers
from services.api.http.openai.protocol.chat_body import ChatBody
from services.api.http.openai.protocol.completion_body import CompletionBody
from services.api.http.openai.protocol.operator_bodies import (
    LoadAdapterBody,
    PauseBody,
    PauseGenerationBody,
    ReloadBody,
    ResumeBody,
    UnloadAdapterBody,
)
from services.api.http.openai.protocol.token_bodies import DetokenizeBody, TokenizeBody
from services.api.http.responses.protocol import CreateResponse
from services.api.http.responses.response_object import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        path: with its parameters in braces, as OpenAPI has them.
        about: one sentence.
        body: of its requests; None: they have none.
        answer: the object that is answered; None: a text of the type ``media``.
        event: the object in each event of an answer that is streamed; None: none is.
        last_event: the text that ends a stream; empty: none does.
        error: the object in every answer that is an error.
        example: a body to try.
        is_open: anybody may ask, without a key.
    """

    path: str
    about: str
    method: Literal["get", "post", "delete"] = "get"
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    media: str = "application/json"
    event: type[BaseModel] | None = None
    last_event: str = ""
    error: type[BaseModel] = service_answers.ErrorAnswer
    example: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False


_DONE = "[DONE]"
_HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/chat/completions",
        method="post",
        about="Go on with a conversation.",
        body=ChatBody,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
        last_event=_DONE,
        example={**_HELLO, "max_tokens": 32, "stream": True},
    ),
    Operation(
        path="/v1/completions",
        method="post",
        about="Continue a text.",
        body=CompletionBody,
        answer=answers.Completion,
        event=answers.CompletionEvent,
        last_event=_DONE,
        example={"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Operation(
        path="/v1/chat/completions/render",
        method="post",
        about="What a conversation would ask of the model, without asking it.",
        body=ChatBody,
        answer=service_answers.Rendered,
        example=_HELLO,
    ),
    Operation(
        path="/v1/messages",
        method="post",
        about="Go on with a conversation, as Anthropic's API has it.",
        body=messages.MessagesBody,
        answer=replies.MessageReply,
        event=replies.MessageEvent,
        error=replies.MessageErrorReply,
        example={**_HELLO, "max_tokens": 32},
    ),
    Operation(
        path="/v1/messages/count_tokens",
        method="post",
        about="How many tokens a conversation has as it is sent to the model.",
        body=messages.CountBody,
        answer=replies.CountReply,
        error=replies.MessageErrorReply,
        example=_HELLO,
    ),
    Operation(
        path="/v1/responses",
        method="post",
        about="Go on with a conversation, as OpenAI's newer API has it.",
        body=CreateResponse,
        answer=ResponseObject,
        event=ResponseEvent,
        example={"input": "Hello!", "max_output_tokens": 32, "store": False},
    ),
    Operation(
        path="/v1/responses/input_tokens",
        method="post",
        about="How many tokens a conversation has as it is sent to the model.",
        body=CreateResponse,
        answer=InputTokens,
        example={"input": "Hello!"},
    ),
    Operation(path="/v1/responses/{id}", about="A stored response.", answer=ResponseObject),
    Operation(path="/v1/responses/{id}", method="delete", about="Delete a stored response.", answer=DeletedResponse),
    Operation(
        path="/v1/responses/{id}/cancel", method="post", about="End a response that is being made.", answer=ResponseObject
    ),
    Operation(path="/v1/responses/{id}/input_items", about="What a stored response answered.", answer=InputItems),
    Operation(
        path="/completion",
        method="post",
        about="Continue a text, as llama-server's API has it.",
        body=ContinueBody,
        answer=LlamaReply,
        event=LlamaEvent,
        example={"prompt": "Once upon a time", "n_predict": 32},
    ),
    Operation(
        path="/infill",
        method="post",
        about="Fill a gap in a text, as llama-server's API has it; of models with fill-in-the-middle tokens.",
        body=InfillBody,
        answer=LlamaReply,
        event=LlamaEvent,
        example={"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16},
    ),
    Operation(
        path="/api/chat",
        method="post",
        about="Go on with a conversation, as Ollama's API has it: lines of JSON, unless stream is false.",
        body=ollama.OllamaChatBody,
        answer=ollama.OllamaChatReply,
        error=ollama.OllamaError,
        example={**_HELLO, "stream": False},
    ),
    Operation(
        path="/api/generate",
        method="post",
        about="Answer a prompt, as Ollama's API has it: lines of JSON, unless stream is false.",
        body=ollama.OllamaGenerateBody,
        answer=ollama.OllamaGenerateReply,
        error=ollama.OllamaError,
        example={"prompt": "Hello!", "stream": False},
    ),
    Operation(
        path="/api/tags", about="The served models, for Ollama's clients.", answer=ollama.Tags, error=ollama.OllamaError
    ),
    Operation(
        path="/api/ps", about="The loaded models, for Ollama's clients.", answer=ollama.Tags, error=ollama.OllamaError
    ),
    Operation(
        path="/api/show",
        method="post",
        about="One of them.",
        body=ollama.ShowBody,
        answer=ollama.ShownModel,
        error=ollama.OllamaError,
        example={},
    ),
    Operation(path="/api/version", about="Outrider's version.", answer=service_answers.Version, is_open=True),
    Operation(
        path="/v1/models", about="The served models, for OpenAI's and Anthropic's clients.", answer=service_answers.Models
    ),
    Operation(path="/v1/models/{id}", about="One of them, by a name that it has.", answer=service_answers.Model),
    Operation(
        path="/v1/load_lora_adapter",
        method="post",
        about="Let requests name a LoRA adapter as their model, as vLLM's API has it; needs the scope admin.",
        body=LoadAdapterBody,
        answer=service_answers.ChangedAdapter,
        example={"lora_name": "billing", "lora_path": "/adapters/billing"},
    ),
    Operation(
        path="/v1/unload_lora_adapter",
        method="post",
        about="Drop a LoRA adapter, once the answers under way with it have ended; needs the scope admin.",
        body=UnloadAdapterBody,
        answer=service_answers.ChangedAdapter,
        example={"lora_name": "billing"},
    ),
    Operation(
        path="/tokenize",
        method="post",
        about="The tokens of a text, or of a conversation as it is sent to the model.",
        body=TokenizeBody,
        answer=service_answers.Tokens,
        example={"prompt": "Once upon a time", "return_token_strs": True},
    ),
    Operation(
        path="/detokenize",
        method="post",
        about="The text of tokens.",
        body=DetokenizeBody,
        answer=service_answers.Text,
        example={"tokens": [1, 2, 3]},
    ),
    Operation(path="/tokenizer_info", about="The tokenizer's settings.", answer=service_answers.TokenizerSettings),
    Operation(
        path="/update_weights_from_disk",
        method="post",
        about="Replace the weights that are served, while serving, as SGLang's API has it; needs the scope admin.",
        body=ReloadBody,
        answer=service_answers.ReloadAnswer,
        example={"model_path": "/checkpoints/step-100", "running": "finish"},
    ),
    Operation(
        path="/pause",
        method="post",
        about="Let nothing be decoded until /resume, as vLLM's API has it; needs the scope admin.",
        body=PauseBody,
        answer=service_answers.PauseAnswer,
        example={"mode": "wait"},
    ),
    Operation(
        path="/resume",
        method="post",
        about="Decode; needs the scope admin.",
        body=ResumeBody,
        answer=service_answers.PauseAnswer,
    ),
    Operation(path="/is_paused", about="Whether it is paused; needs the scope admin.", answer=service_answers.IsPaused),
    Operation(
        path="/pause_generation",
        method="post",
        about="As /pause, by SGLang's names.",
        body=PauseGenerationBody,
        answer=service_answers.PauseAnswer,
        example={"mode": "in_place"},
    ),
    Operation(
        path="/continue_generation",
        method="post",
        about="As /resume, by SGLang's name.",
        body=ResumeBody,
        answer=service_answers.PauseAnswer,
    ),
    Operation(path="/v1/outrider/status", about="The live state of the service.", answer=service_answers.Status),
    Operation(
        path="/metrics",
        about="Sums over all requests, for Prometheus (server.metrics).",
        media="text/plain; version=0.0.4; charset=utf-8",
    ),
    Operation(path="/health", about="This process answers.", answer=service_answers.Health, is_open=True),
    Operation(path="/ready", about="A request would be answered.", answer=service_answers.Health, is_open=True),
    Operation(
        path="/v2/health/live",
        about="This process answers, as the open inference protocol asks.",
        answer=service_answers.Live,
        is_open=True,
    ),
    Operation(
        path="/v2/health/ready",
        about="A request would be answered, as the open inference protocol asks.",
        answer=service_answers.Ready,
        is_open=True,
    ),
    Operation(path="/version", about="Outrider's version.", answer=service_answers.Version, is_open=True),
    Operation(
        path="/", about="A page for browsers: a chat that shows who guessed which token.", media="text/html", is_open=True
    ),
    Operation(path="/docs", about="A page for browsers: what each path takes and answers.", media="text/html", is_open=True),
    Operation(path="/openapi.json", about="The same for programs: this document.", is_open=True),
)
