"""The ASGI application: paths and their endpoints, API keys, and the headers that every answer has."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.access.gate import Gate
from services.api.call_slots import CallSlots
from services.api.config import HEADER_BYTES, LOOPBACK, LOOPBACK_NAMES, HttpConfig
from services.api.http.call import HttpCall
from services.api.http.door import ANTHROPIC, OLLAMA, OPENAI, Door
from services.api.http.endpoints import Endpoints
from services.api.http.messages.endpoints import MessageEndpoints
from services.api.http.model_endpoints import ModelEndpoints
from services.api.http.ollama.endpoints import OllamaEndpoints
from services.api.http.openai.errors import HttpError, Refused
from services.api.http.openai.field_table import KNOWN
from services.api.http.openapi import openapi
from services.api.http.operator_endpoints import AdapterEndpoints, TrainerEndpoints
from services.api.http.responses.protocol import CreateResponse
from services.api.http.responses.response_endpoints import ResponseEndpoints
from services.api.http.responses.stored_responses import ResponseStore
from services.api.http.unserved_paths import instead_of, unknown_path
from services.api.messages import RouterPort
from services.links.request_names import request_id_of, traceparent_of
from speculation.errors import Cancelled, Internal, OutriderError, Unauthenticated, Unavailable

log = logging.getLogger(__name__)

_MESSAGES, _MODELS, _OLLAMA_S, _LM_STUDIO_S = "/v1/messages", "/v1/models", "/api/", ("/api/v0/", "/api/v1/")
# Where KServe has OpenAI's API.
_KSERVE_S = "/openai/v1/"
# A header of Anthropic's clients.
_VERSION = "anthropic-version"
_PORT = re.compile(r":\d*$")
# What stands before and behind an id in a path, the longest first.
_AROUND_IDS = (
    ("/v1/responses/", "/input_items"),
    ("/v1/responses/", "/cancel"),
    ("/v1/responses/", ""),
    (f"{_MODELS}/", ""),
)
_RESPONSE = "/v1/responses/{id}"
# The one field that has a place in queries, too, says what the answer to a GET may leave out; none does.
_OF_RESPONSES = frozenset(CreateResponse.model_fields) - {"include"}
_CLOSING = [("connection", "close")]


@dataclass(frozen=True, slots=True)
class _Path:
    method: str
    handler: Callable[[HttpCall], Awaitable[None]]
    # Anyone may ask, also while the server is busy or stopping.
    is_open: bool = False
    # Its name in the audit log, where it counts as one of its key's requests; empty: its own code does both.
    counted: str = ""
    # What its key must be allowed; None: nothing.
    scope: str | None = None
    # The same path with another method.
    beside: _Path | None = None

    @property
    def all(self) -> tuple[_Path, ...]:
        """With every method that the path takes."""
        return (self,) if self.beside is None else (self, *self.beside.all)


class HttpApp:
    """An ASGI application in front of a router.

    Attributes:
        leaving: balancers are told to send no more requests.
        draining: new requests are refused.
    """

    def __init__(
        self,
        router: RouterPort,
        config: HttpConfig,
        gate: Gate,
        store: ResponseStore,
        exposition: Callable[[], bytes] = bytes,
    ) -> None:
        self._gate = gate
        self._hosts = config.hosts or (LOOPBACK_NAMES if config.host in LOOPBACK else ())
        self._asks_for_keys = config.public.asks_for_keys
        self._slots = CallSlots(config.public.max_concurrent_requests, "max_concurrent_requests")
        self._endpoints = ends = Endpoints(router, gate, config, exposition)
        responses = ResponseEndpoints(ends, store, gate, config)
        strict = config.unknown_fields == "refuse"
        messages, others = MessageEndpoints(ends, router, strict=strict), ModelEndpoints(ends, router, strict=strict)
        adapters, trainers = AdapterEndpoints(ends, router, strict=strict), TrainerEndpoints(ends, router, strict=strict)
        self._taken = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.leaving = False
        self.draining = False
        self._paths = {
            "/v1/chat/completions": _Path("POST", ends.chat),
            "/v1/completions": _Path("POST", ends.completions),
            _MESSAGES: _Path("POST", messages.message),
            f"{_MESSAGES}/count_tokens": _Path("POST", messages.count, counted="CountTokens", scope="generate"),
            "/v1/chat/completions/render": _Path("POST", others.render, counted="Render", scope="generate"),
            **_of_ollama(OllamaEndpoints(ends, router, strict=strict)),
            "/v1/responses": _Path("POST", responses.create),
            "/v1/responses/input_tokens": _Path("POST", responses.count, counted="CountInputTokens", scope="generate"),
            _RESPONSE: _Path(
                "GET",
                responses.retrieve,
                counted="GetResponse",
                scope="generate",
                beside=_Path("DELETE", responses.delete, counted="DeleteResponse", scope="generate"),
            ),
            f"{_RESPONSE}/cancel": _Path("POST", responses.cancel),
            f"{_RESPONSE}/input_items": _Path("GET", responses.input_items, counted="ListInputItems", scope="generate"),
            _MODELS: _Path("GET", ends.models, counted="ListModels"),
            f"{_MODELS}/{{id}}": _Path("GET", ends.model, counted="ListModels"),
            "/v1/load_lora_adapter": _Path("POST", adapters.load, counted="LoadAdapter", scope="admin"),
            "/v1/unload_lora_adapter": _Path("POST", adapters.unload, counted="UnloadAdapter", scope="admin"),
            # A page asks for it every two seconds: it is left out of the audit log.
            "/v1/outrider/status": _Path("GET", ends.status),
            "/tokenize": _Path("POST", ends.tokenize, counted="Tokenize", scope="generate"),
            "/detokenize": _Path("POST", ends.detokenize, counted="Detokenize", scope="generate"),
            "/update_weights_from_disk": _Path("POST", trainers.reload, counted="Reload", scope="admin"),
            "/pause": _Path("POST", trainers.pause, counted="Pause", scope="admin"),
            "/resume": _Path("POST", trainers.resume, counted="Resume", scope="admin"),
            "/is_paused": _Path("GET", trainers.is_paused, counted="IsPaused", scope="admin"),
            "/pause_generation": _Path("POST", trainers.pause_generation, counted="Pause", scope="admin"),
            "/continue_generation": _Path("POST", trainers.resume, counted="Resume", scope="admin"),
            **_of_llama_server(others),
            "/tokenizer_info": _Path("GET", others.tokenizer_info, counted="TokenizerInfo", scope="generate"),
            **_for_everybody(ends),
        }
        if config.metrics:
            # As often asked for as the state.
            self._paths["/metrics"] = _Path("GET", ends.metrics)
        if config.page:
            # They hold no secret; the first one asks for a key itself where its requests need one.
            self._paths |= {
                "/": _Path("GET", ends.page, is_open=True),
                "/docs": _Path("GET", ends.docs, is_open=True),
                "/openapi.json": _Path("GET", self._openapi, is_open=True),
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotImplementedError("HTTP alone")
        client = scope.get("client") or ("", 0)
        call = HttpCall(
            headers=Headers(scope=scope), receive=receive, send_raw=send, address=f"{client[0]}:{client[1]}", gate=self._gate
        )
        path: str = scope["path"]
        if path.startswith(_KSERVE_S):
            path = path.removeprefix("/openai")
        call.door = _door(path, call.headers)
        try:
            await self._answer(call, scope["method"], path, scope.get("query_string", b"").decode("latin-1"))
        except Cancelled as error:
            log.info("request %s: %s", call.log_name, error)
        except OutriderError as error:
            await self._fail(call, error)
        except Exception:
            log.exception("request %s failed", call.log_name)
            await self._fail(call, Internal("internal error; the server's log says why"))

    async def _openapi(self, call: HttpCall) -> None:
        """GET /openapi.json: what each path takes and answers, for programs."""
        await call.answer_bytes(*openapi(frozenset(self._paths), asks_for_keys=self._asks_for_keys))

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for ``grace_s`` seconds, then end them with an error."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            for running in tuple(self._endpoints.running.values()):
                running.fail(Unavailable("the server is stopping; try again"))
        await self._endpoints.stop()

    async def _answer(self, call: HttpCall, method: str, path: str, query: str) -> None:
        metadata = [(name, value) for name, value in call.headers.items()]
        call.request_id = request_id_of(metadata)
        call.traceparent = traceparent_of(metadata)
        _check_framing(call.headers)
        self._check_host(call.headers)
        found = self._find(call, method, path)
        call.query = parse_qsl(query, keep_blank_values=True)
        if found.is_open:
            if self.leaving and path.endswith("/ready"):
                raise Unavailable("the server is stopping")
            await found.handler(call)
            return
        if self.draining:
            raise Unavailable("the server is stopping; try again")
        call.caller = self._gate.caller(key_of(call.headers), call.address)
        _check_query(call.query)
        with self._slots.taken(call.address), self._under_way():
            counted = self._gate.counted(call.caller, found.counted, call.request_id, scope=found.scope)
            with counted if found.counted else nullcontext():
                await found.handler(call)

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """A request for whose end ``drain`` waits."""
        self._taken += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._taken -= 1
            if not self._taken:
                self._empty.set()

    def _find(self, call: HttpCall, method: str, path: str) -> _Path:
        # Some of them look like ids of what is served.
        said = None if path in self._paths else instead_of(path)
        path, call.path_id = (path, "") if path in self._paths else _without_id(path)
        known = None if said else self._paths.get(path)
        if known is None:
            raise HttpError(404, "unknown_url", said or unknown_path(path, sorted(self._paths)))
        for found in known.all:
            if method == found.method or (method == "HEAD" and found.is_open):
                return found
        methods = ", ".join(each.method for each in known.all)
        raise HttpError(405, "method_not_supported", f"{path} takes {methods} alone", [("allow", methods)])

    def _check_host(self, headers: Headers) -> None:
        """A page in a browser may have its name point to loopback, but cannot send another name than its own."""
        name = _PORT.sub("", headers.get("host", "")).lower()
        if self._hosts and name not in self._hosts:
            allowed = ", ".join(self._hosts)
            raise HttpError(403, "unknown_host", f"host is {name or 'unset'}: must be one of {allowed} (server.http_hosts)")

    async def _fail(self, call: HttpCall, error: OutriderError) -> None:
        if not call.begun:
            # A connection that stays would bring its next request here as well.
            await call.refuse(error, _CLOSING if self.draining else None)


def _of_llama_server(ends: ModelEndpoints) -> dict[str, _Path]:
    return {"/completion": _Path("POST", ends.continue_text), "/infill": _Path("POST", ends.infill)}


def _of_ollama(ends: OllamaEndpoints) -> dict[str, _Path]:
    return {
        "/api/chat": _Path("POST", ends.chat),
        "/api/generate": _Path("POST", ends.generate),
        "/api/tags": _Path("GET", ends.tags, counted="ListModels"),
        "/api/ps": _Path("GET", ends.tags, counted="ListModels"),
        "/api/show": _Path("POST", ends.show, counted="ShowModel"),
        "/api/version": _Path("GET", ends.version, is_open=True),
    }


def _for_everybody(ends: Endpoints) -> dict[str, _Path]:
    handlers = {
        "/health": ends.health,
        "/ready": ends.ready,
        "/version": ends.version,
        # By the names of the open inference protocol.
        "/v2/health/live": ends.live,
        "/v2/health/ready": ends.ready_by_protocol,
    }
    return {path: _Path("GET", handler, is_open=True) for path, handler in handlers.items()}


def _door(path: str, headers: Headers) -> Door:
    """The API that a client speaks. OpenAI's and Anthropic's have some paths in common, such as that of the models."""
    if path.startswith(_OLLAMA_S) and not path.startswith(_LM_STUDIO_S):
        return OLLAMA
    return ANTHROPIC if path.startswith(_MESSAGES) or _VERSION in headers else OPENAI


def _without_id(path: str) -> tuple[str, str]:
    """A path as it is registered, and the id in it."""
    for before, behind in _AROUND_IDS:
        if path.startswith(before) and path.endswith(behind):
            return f"{before}{{id}}{behind}", path[len(before) : len(path) - len(behind)]
    return path, ""


def _check_query(query: Sequence[tuple[str, str]]) -> None:
    """Refuse what is said behind the path and belongs into the body. Other parameters, such as Azure's api-version, ask for
    nothing here.

    Raises:
        Refused: there is a field; names it.
    """
    for name, value in query:
        if name in KNOWN or name in _OF_RESPONSES:
            raise Refused(name, value or "empty", "unset in the query: fields stand in the body", "unknown_parameter")


def _check_framing(headers: Headers) -> None:
    """Check for what h11 lets through: headers of any size that come in one piece, and bodies of two lengths.

    A proxy in front may believe the other length, and what follows is no request then (RFC 9112, 6.1).

    Raises:
        HttpError: they are refused.
    """
    if (size := sum(len(name) + len(value) for name, value in headers.raw)) > HEADER_BYTES:
        raise HttpError(431, "headers_too_large", f"headers are {size} bytes: must be at most {HEADER_BYTES}", _CLOSING)
    if "content-length" in headers and "transfer-encoding" in headers:
        raise HttpError(400, "two_lengths", "content-length and transfer-encoding are set: must be one of the two", _CLOSING)


_SCHEME = "bearer "


def key_of(headers: Headers) -> str | None:
    """The API key, from ``Authorization: Bearer`` or ``X-Api-Key``.

    Raises:
        Unauthenticated: both are there, with different keys.
    """
    given = headers.get("authorization", "")
    bearer = given[len(_SCHEME) :].strip() if given.lower().startswith(_SCHEME) else None
    own = headers.get("x-api-key")
    if bearer and own and bearer != own:
        raise Unauthenticated("authorization and x-api-key carry different API keys: send one of them")
    return bearer or own or None
