"""Malformed HTTP requests, from a seed, and a client that sends bytes and reads what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

TEXTS = ("", "fox", "\x00", "\ufffd", "a" * 300, "é" * 40, "<|im_end|>", "{{ 7 }}")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.5, 1e308, -1e308, 10**30, "", "x", "1", [], [1], ["x"], [[1]], [None], {}, {"a": 1},
    {"type": "text"}, [{}], [{"role": "user"}], "a" * 5000, -0.0, 2**31, "null",
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "echo", "best_of",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "tools", "tool_choice", "prediction",
    "speculation", "structured_outputs", "ignore_eos", "min_tokens", "skip_special_tokens", "return_token_ids", "user",
    "metadata", "store", "modalities", "service_tier", "parallel_tool_calls", "chat_template_kwargs", "truncate_prompt_tokens",
    "add_generation_prompt", "continue_final_message", "text", "tokens", "add_special_tokens", "unheard_of", "system",
    "stop_sequences", "thinking", "output_config", "cache_control", "context_management", "container", "mcp_servers", "input",
    "instructions", "previous_response_id", "max_output_tokens", "include", "reasoning", "truncation", "suffix", "input_prefix",
    "input_suffix", "input_extra", "n_predict", "samplers", "id_slot", "cache_prompt", "options", "format", "think", "raw",
    "template", "context", "images", "keep_alive", "json_schema", "response_fields", "typical_p", "repeat_penalty", "n_indent",
    "thinking_token_budget", "verbosity", "client_metadata",
)  # fmt: skip
_FOX = [{"role": "user", "content": "fox"}]
# Bodies of requests that are answered.
_GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _FOX, "max_tokens": 2},
    "/v1/completions": {"prompt": "fox", "max_tokens": 2},
    "/v1/messages": {"messages": _FOX, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": _FOX},
    "/v1/responses": {"input": "fox", "max_output_tokens": 2},
    "/v1/chat/completions/render": {"messages": _FOX, "max_tokens": 2},
    "/v1/responses/input_tokens": {"input": "fox"},
    "/completion": {"prompt": "fox", "n_predict": 2},
    "/api/chat": {"messages": _FOX, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "fox", "options": {"num_predict": 2}},
    "/api/show": {},
    "/infill": {"input_prefix": "fox", "input_suffix": "dog", "n_predict": 2},
    "/tokenize": {"prompt": "fox"},
    "/detokenize": {"tokens": [1, 2]},
}
PATHS = tuple(_GOOD)
# A request was bad; a method or a length is not accepted. Everything else would be the server's own failure.
BAD = frozenset({400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 422, 426, 429, 431, 501, 505})
FINE = frozenset({200})


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is sent, and what may come back.

    Attributes:
        allowed: the status that every answer may have.
        answers: how many answers there are at least, and at most; after fewer than the most the server has closed.
        half_close: end our own direction after sending.
    """

    kind: str
    data: bytes
    allowed: frozenset[int]
    answers: tuple[int, int] = (1, 1)
    half_close: bool = False


def exchange(source: random.Random, host: str) -> Exchange:
    """The next one, to a server that is called ``host``."""
    made = source.choices(KINDS, [5 if kind in (_wrong_types, _damaged_json) else 1 for kind in KINDS])[0]
    return made(source, host)


def request(host: str, path: str, body: bytes = b"", headers: Iterable[str] = (), method: str = "POST") -> bytes:
    """A request whose length is right unless ``headers`` say anything about it."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in lines):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def good(path: str = "/v1/completions") -> dict[str, Any]:
    """The body of a request that is answered (/infill: by models with the tokens for it)."""
    return dict(_GOOD[path])


def _wrong_types(source: random.Random, host: str) -> Exchange:
    path = source.choice(PATHS)
    body = good(path)
    for _ in range(source.randint(0, 3)):
        body[source.choice(FIELDS)] = source.choice(VALUES)
    return Exchange("wrong types", request(host, path, json.dumps(body).encode()), BAD | FINE)


def _damaged_json(source: random.Random, host: str) -> Exchange:
    path = source.choice(PATHS)
    data = bytearray(json.dumps(good(path)).encode())
    for _ in range(source.randint(1, 4)):
        data[source.randrange(len(data))] = source.randrange(256)
    if source.random() < 0.3:
        del data[source.randrange(len(data)) :]
    return Exchange("damaged JSON", request(host, path, bytes(data)), BAD | FINE)


def _no_json(source: random.Random, host: str) -> Exchange:
    deep = source.choice((100, 5000, 100_000))
    body = source.choice(
        (b"", b"[]", b"null", b"1", b'"x"', b"{", b"}{", b"\xff\xfe", b"NaN", b'{"prompt": NaN}', b"[" * deep,
         b'{"a":' * min(deep, 5000), b'{"a": 1e99999}', b'{"a": ' + b"9" * 6000 + b"}", b'{"prompt": "\\ud800"}',
         b'{"prompt": "a", "prompt": "b"}', b"\x00" * 100)
    )  # fmt: skip
    return Exchange("no JSON object", request(host, source.choice(PATHS), body), BAD)


def _huge_headers(source: random.Random, host: str) -> Exchange:
    headers = [f"X-{n}: {'a' * 500}" for n in range(200)] if source.random() < 0.5 else ["X-Long: " + "a" * 100_000]
    return Exchange("huge headers", request(host, "/v1/models", headers=headers, method="GET"), BAD, (0, 1))


def _bad_headers(source: random.Random, host: str) -> Exchange:
    header = source.choice(
        ("No colon", ": no name", "Sp ace: x", "Space : x", "X: a\x00b", "X: a\rb", " folded", "Content-Length: -1", "Content-Length: x",
         "Content-Length: 1, 2", "Content-Length: 5\r\nContent-Length: 6", f"Host: {host}", "Transfer-Encoding: gzip",
         "Transfer-Encoding: chunked, identity", "Transfer-Encoding: xchunked", "Content-Length: +5", "Content-Length: 0x5",
         "Content-Length: 99999999999999999999", "Content-Length: 1000000000000")
    )  # fmt: skip
    return Exchange("bad headers", request(host, "/v1/completions", b"hello", [header]), BAD | FINE, (0, 2), half_close=True)


def _bad_chunks(source: random.Random, host: str) -> Exchange:
    body = source.choice(
        (b"x\r\nabc\r\n", b"-1\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFFFF\r\n", b"3;" + b"e" * 70_000,
         b"3\nabc\n0\n\n", b"\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n", b" 3\r\nabc\r\n0\r\n\r\n", b"3\r\nabc")
    )  # fmt: skip
    data = request(host, "/v1/completions", body, ["Transfer-Encoding: chunked"])
    return Exchange("bad chunks", data, BAD, (0, 2), half_close=True)


def _smuggled(source: random.Random, host: str) -> Exchange:
    """A request in what one party takes for the body of another: only one reading may be answered, and nothing after it."""
    hidden = request(host, "/version", method="GET")
    chunked = b"0\r\n\r\n" + hidden
    headers = source.choice(
        (["Content-Length: 5", "Transfer-Encoding: chunked"], ["Transfer-Encoding: chunked", f"Content-Length: {len(chunked)}"],
         ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked", f"Content-Length: {len(chunked)}"],
         ["Transfer-Encoding: \tchunked", "Content-Length: 5"], ["Transfer-Encoding : chunked", f"Content-Length: {len(chunked)}"],
         ["Content-Length: 5", f"Content-Length: {len(chunked)}"])
    )  # fmt: skip
    return Exchange("smuggled", request(host, "/v1/completions", chunked, headers), BAD, (0, 1), half_close=True)


def _pipelined(source: random.Random, host: str) -> Exchange:
    one = request(host, "/version", method="GET")
    two = request(host, "/v1/completions", json.dumps(good()).encode())
    return Exchange("pipelined", one + two + one, FINE, (3, 3))


def _half_closed(source: random.Random, host: str) -> Exchange:
    whole = request(host, "/v1/completions", json.dumps(good()).encode())
    cut = len(whole) if source.random() < 0.3 else source.randrange(1, len(whole))
    return Exchange("half-closed", whole[:cut], BAD | FINE, (0, 1), half_close=True)


def _no_http(source: random.Random, host: str) -> Exchange:
    data = source.choice(
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /\r\n\r\n", b"\r\n" * 50,
         b"GET / HTTP/9.9\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"\x00" * 64, source.randbytes(100), b"A" * 70_000,
         b"GET /version HTTP/1.1\r\n\r\n", b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n")
    )  # fmt: skip
    return Exchange("no HTTP", data, BAD, (0, 2), half_close=True)


def _other_calls(source: random.Random, host: str) -> Exchange:
    path = source.choice(
        (
            *PATHS,
            "/",
            "/v1",
            "/v1/models/" + "x" * 3000,
            "/../../etc/passwd",
            "/%00",
            "/v1/completions/",
            "*",
            "/v1/models/%ff",
        )
    )
    method = source.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW", "HEAD", "TRACE", "CONNECT"))
    host = source.choice((host, "evil.example", "", host + "\tx"))
    # There is no body after HEAD, whatever its length says.
    return Exchange("other calls", request(host, path, method=method), BAD, (0, 1), half_close=True)


KINDS: tuple[Callable[[random.Random, str], Exchange], ...] = (
    _wrong_types, _damaged_json, _no_json, _huge_headers, _bad_headers, _bad_chunks, _smuggled, _pipelined, _half_closed,
    _no_http, _other_calls,
)  # fmt: skip


class RawClient:
    """One connection to a server, made anew whenever it is closed."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def converse(self, made: Exchange) -> list[tuple[int, bytes]]:
        """Send it, and read answers (status, body) until there are as many as there may be, or the server closes."""
        answers: list[tuple[int, bytes]] = []
        keep, used = not made.half_close, self._streams is not None
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        reader, writer = self._streams
        try:
            writer.write(made.data)
            if made.half_close:
                writer.write_eof()
            while made.half_close or len(answers) < made.answers[1]:
                status, body, goes_on = await _answer(reader, bodiless=made.data.startswith(b"HEAD"))
                if status >= 200:
                    answers.append((status, body))
                keep = keep and goes_on
        except (OSError, asyncio.IncompleteReadError):
            keep = False
        if not keep:
            await self.close()
        # A connection that has been idle may be closed by the server just when something is sent.
        return await self.converse(made) if used and not answers and made.answers[0] else answers

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def _answer(reader: asyncio.StreamReader, *, bodiless: bool) -> tuple[int, bytes, bool]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    status, body = int(head[0].split()[1]), b""
    if status >= 200 and not bodiless:
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        else:
            body = await reader.read()
    return status, body, headers.get("connection") != "close"


def wrong_with(made: Exchange, answers: list[tuple[int, bytes]]) -> str:
    """What is wrong with the answers, in words; empty: nothing."""
    least, most = made.answers
    if not least <= len(answers) <= most:
        return f"{len(answers)} answers: {[status for status, _ in answers]}"
    for status, body in answers:
        if status not in made.allowed:
            return f"status {status}: {body[:200]!r}"
        if b"Traceback" in body:
            return "a traceback"
    return ""
