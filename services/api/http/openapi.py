"""/openapi.json: the declared operations as OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.1.html)."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from services.api.http.declared import schemas_of
from services.api.http.openai.errors import Headers
from services.api.http.openai.usage import server_version
from services.api.http.operations import OPERATIONS, Operation
from services.api.http.written_json import written

# Where the schemas of objects are.
Places = dict[type[BaseModel], Any]
# Why requests fail, by status: all of them, those of paths that are not open, and those that have a body.
_ANY = {
    400: "Something is wrong with the request; error.param names the field.",
    403: "The Host header names another server, or the key may not do this.",
    431: "The headers are too large.",
    500: "The server has failed.",
    503: "Nothing can answer at the moment.",
}
_KEYED = {
    401: "The API key is missing, unknown or expired.",
    404: "There is no such model.",
    429: "Too many requests, or tokens.",
}
_WITH_BODY = {
    408: "The body has not arrived in time.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    504: "It took too long.",
}
_WAIT = (429, 503)
_ABOUT = (
    "Lossless speculative decoding behind OpenAI's API: every answer is what plain decoding gives with the same seed. "
    "A field is honoured, or has no effect (x-effect: none), or takes null alone, since all else asks for something that is "
    "not done. Other fields are refused."
)


@cache
def openapi(paths: frozenset[str], *, asks_for_keys: bool) -> tuple[bytes, Headers]:
    """The document, and the headers that it is sent with.

    Args:
        paths: those that are served.
        asks_for_keys: requests need an API key, but for open paths.
    """
    served = [operation for operation in OPERATIONS if operation.path in paths]
    models: list[type[BaseModel]] = []
    models += [model for each in served for model in (each.body, each.answer, each.event, each.error) if model is not None]
    places, schemas = schemas_of([*dict.fromkeys(models)])
    found: dict[str, dict[str, Any]] = {}
    for operation in served:
        found.setdefault(operation.path, {})[operation.method] = _operation(operation, places, asks_for_keys=asks_for_keys)
    document = {
        "openapi": "3.1.1",
        "info": {"title": "Outrider", "version": server_version(), "description": _ABOUT},
        "paths": found,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return written(document), [("content-type", "application/json"), ("cache-control", "no-cache")]


def _operation(operation: Operation, places: Places, *, asks_for_keys: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "summary": operation.about,
        "operationId": f"{operation.method}{operation.path.replace('/', '_').replace('{', '').replace('}', '')}",
        "security": [{"bearer": []}, {"header": []}] if asks_for_keys and not operation.is_open else [],
        "responses": {"200": _answer(operation, places), **_errors(operation, places)},
    }
    if names := [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]:
        told["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if operation.body is not None:
        content: dict[str, Any] = {"schema": places[operation.body]}
        if operation.example:
            content["example"] = operation.example
        told["requestBody"] = {"required": True, "content": {"application/json": content}}
    return told


def _answer(operation: Operation, places: Places) -> dict[str, Any]:
    plain: dict[str, Any] = {} if operation.answer is None else {"schema": places[operation.answer]}
    content = {operation.media: plain}
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(operation, places)}
    named = {"x-request-id": {"description": "the request's name", "schema": {"type": "string"}}}
    return {"description": "The answer.", "headers": named, "content": content}


def _event(operation: Operation, places: Places) -> dict[str, Any]:
    """One event of a stream: OpenAPI 3.1 has no word for all of them."""
    assert operation.event is not None
    contents = (places[operation.event], places[operation.error])
    told = [{"type": "string", "contentMediaType": "application/json", "contentSchema": each} for each in contents]
    last = [{"const": operation.last_event, "description": "the last event"}] if operation.last_event else []
    return {"type": "object", "properties": {"data": {"anyOf": [*told, *last]}}}


def _errors(operation: Operation, places: Places) -> dict[str, Any]:
    known = {**_ANY, **({} if operation.is_open else _KEYED), **({} if operation.body is None else _WITH_BODY)}
    wait = {"retry-after": {"description": "seconds", "schema": {"type": "integer"}}}
    return {
        str(status): {
            "description": why,
            **({"headers": wait} if status in _WAIT else {}),
            "content": {"application/json": {"schema": places[operation.error]}},
        }
        for status, why in sorted(known.items())
    }
