"""What each path takes and answers, as it is declared: /openapi.json and /docs tell of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from services.api.http.openai.protocol import answers, service_answers
from services.api.http.openai.protocol.chat_body import ChatBody
from services.api.http.openai.protocol.completion_body import CompletionBody
from services.api.http.openai.protocol.token_bodies import DetokenizeBody, TokenizeBody


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        path: with its parameters in braces, as OpenAPI has them.
        about: one sentence.
        body: of its requests; None: they have none.
        answer: the object that is answered; None: a text of the type ``media``.
        event: the object in each event of an answer that is streamed; None: none is.
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
    example: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False


_PAGE = "text/html; charset=utf-8"
_HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/chat/completions",
        method="post",
        about="Go on with a conversation.",
        body=ChatBody,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
        example={**_HELLO, "max_tokens": 32, "stream": True},
    ),
    Operation(
        path="/v1/completions",
        method="post",
        about="Continue a text.",
        body=CompletionBody,
        answer=answers.Completion,
        event=answers.CompletionEvent,
        example={"prompt": "Once upon a time", "max_tokens": 32},
    ),
    Operation(path="/v1/models", about="The served models.", answer=service_answers.Models),
    Operation(path="/v1/models/{model}", about="One of them, by a name that it has.", answer=service_answers.Model),
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
    Operation(path="/v1/outrider/status", about="The live state of the service.", answer=service_answers.Status),
    Operation(
        path="/metrics",
        about="Sums over all requests, for Prometheus (server.metrics).",
        media="text/plain; version=0.0.4; charset=utf-8",
    ),
    Operation(path="/health", about="This process answers.", answer=service_answers.Health, is_open=True),
    Operation(path="/ready", about="A request would be answered.", answer=service_answers.Health, is_open=True),
    Operation(path="/version", about="Outrider's version.", answer=service_answers.Version, is_open=True),
    Operation(
        path="/", about="A page for browsers: a chat that shows who guessed which token.", media="text/html", is_open=True
    ),
    Operation(path="/docs", about="A page for browsers: what each path takes and answers.", media="text/html", is_open=True),
    Operation(path="/openapi.json", about="The same for programs: this document.", is_open=True),
)
