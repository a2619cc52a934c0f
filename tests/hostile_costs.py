"""What one request can cost: every field that a caller fills, on every door, at its limit and at half of it.

``python -m tests.hostile_costs [NAME ...]`` prints the table of docs/log.md. The server runs in a process of its own, on a
tiny model with a long context; while a request is answered, others ask whether the server lives.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from outrider.v1 import generation_pb2 as pb
from services.api.grpc.server import SERVICE
from speculation.limits import MAX_GRAMMAR_CHARACTERS, MAX_PUBLIC_MESSAGE_BYTES
from tests.tiny import make_tiny_model

CONTEXT = 131_072
SETTINGS = (f"verifier.max_model_len={CONTEXT}", f"verifier.kv_cache_tokens={CONTEXT}")
# Bytes of a body, beside its frame; characters of a grammar.
WHOLE, GRAMMAR, TEXT = MAX_PUBLIC_MESSAGE_BYTES - 4096, MAX_GRAMMAR_CHARACTERS, 13 * CONTEXT
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Attack:
    """One field, filled with ``make(size)``; the size is at most ``most``.

    Attributes:
        door: a path of the HTTP server, or the name of a gRPC method.
    """

    name: str
    door: str
    most: int
    make: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Cost:
    """What an attack cost: processor seconds of the server, and the longest that somebody else waited for /health.

    Attributes:
        end: an HTTP status, or that of gRPC.
    """

    cpu_s: float
    health_s: float
    end: str


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}).encode()


def _message(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}).encode()


def _count(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()


def _completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 1, **fields}, ensure_ascii=False).encode()


def _grammar(kind: str, make: Callable[[int], Any]) -> Callable[[int], bytes]:
    return lambda size: _completion(structured_outputs={kind: make(size)})


def _response(**fields: Any) -> bytes:
    return json.dumps({"input": "x", "max_output_tokens": 1, **fields}).encode()


def _cut(piece: str, size: int) -> str:
    return (piece * (size // len(piece) + 1))[:size]


def _generate(**fields: Any) -> bytes:
    given = {"prompt": "x", **fields}
    sampling = pb.SamplingParams(max_tokens=1, **given.pop("sampling", {}))
    return pb.GenerateRequest(sampling=sampling, **given).SerializeToString()


def _messages(size: int) -> bytes:
    return pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage()] * (size // 2))).SerializeToString()


CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
RESPONSES = "/v1/responses"
MESSAGES, COUNT, INFILL, RENDER = "/v1/messages", "/v1/messages/count_tokens", "/infill", f"{CHAT}/render"
GENERATE = f"/{SERVICE}/Generate"

ATTACKS = (
    *(
        Attack(f"prompt of {name}", COMPLETIONS, TEXT, lambda size, p=piece: _completion(prompt=_cut(p, size)))  # type: ignore[misc]
        for name, piece in (("words", "the fox "), ("one letter", "a"), ("lines", "\n"))
    ),
    Attack("prompt of CJK", COMPLETIONS, WHOLE // 3, lambda size: _completion(prompt=_cut("東京", size))),
    Attack("prompt of ids", COMPLETIONS, WHOLE // 3, lambda size: _completion(prompt=[5] * size)),
    Attack("many prompts", COMPLETIONS, WHOLE // 5, lambda size: _completion(prompt=["a"] * size)),
    Attack("empty lists", COMPLETIONS, WHOLE // 4, lambda size: _completion(prompt=[[]] * size)),
    Attack("floats", COMPLETIONS, WHOLE // 7, lambda size: _completion(prompt=[1e30] * size)),
    Attack("infinite numbers", COMPLETIONS, WHOLE // 7, lambda size: json.dumps({"prompt": ["_"] * size}).replace('"_"', "1e999").encode()),
    Attack("an integer of many digits", COMPLETIONS, WHOLE, lambda size: b'{"prompt": "x", "seed": ' + b"9" * size + b"}"),
    Attack("unknown fields", COMPLETIONS, WHOLE // 15, lambda size: _completion(**{f"f{n:06d}": 1 for n in range(size)})),
    Attack("white space", COMPLETIONS, WHOLE, lambda size: b" " * size + _completion()),
    Attack("brackets", COMPLETIONS, WHOLE, lambda size: b"[" * size),
    Attack("escapes", COMPLETIONS, WHOLE // 6, lambda size: b'{"prompt": "' + b"\\u0000" * size + b'"}'),
    Attack("stop strings", COMPLETIONS, 16, lambda size: _completion(stop=["a" * 255 + chr(98 + n) for n in range(size)], max_tokens=64, ignore_eos=True)),
    Attack("many stop strings", COMPLETIONS, WHOLE // 5, lambda size: _completion(stop=["a"] * size)),
    Attack("stop_token_ids", COMPLETIONS, WHOLE // 3, lambda size: _completion(stop_token_ids=[5] * size)),
    Attack("logit_bias", COMPLETIONS, 256, lambda size: _completion(logit_bias={str(n): 1 for n in range(size)})),
    Attack("many logit_bias", COMPLETIONS, WHOLE // 14, lambda size: _completion(logit_bias={str(n): 1 for n in range(size)})),
    Attack("bad_words", COMPLETIONS, 256, lambda size: _completion(bad_words=[f"{n:03d}" + "ab" * 100 for n in range(size)])),
    Attack("a long bad word", COMPLETIONS, WHOLE, lambda size: _completion(bad_words=["a" * size])),
    Attack("allowed_token_ids", COMPLETIONS, WHOLE // 6, lambda size: _completion(allowed_token_ids=[n % 300 for n in range(size)])),
    Attack("cache_salt", COMPLETIONS, WHOLE, lambda size: _completion(cache_salt="a" * size)),
    Attack("model", COMPLETIONS, WHOLE, lambda size: _completion(model="a" * size)),
    Attack("user", COMPLETIONS, WHOLE, lambda size: _completion(user="a" * size)),
    *(
        Attack(f"grammar of {name}", COMPLETIONS, GRAMMAR, _grammar("grammar", lambda size, p=piece: _cut(p, size)))  # type: ignore[misc]
        for name, piece in (("lines", "\n"), ("open brackets", "a[\n"), ("quotes", 'a["'), ("parentheses", "("), ("names", "a"))
    ),
    Attack("grammar of rules", COMPLETIONS, 2500, _grammar("grammar", lambda size: "start: a0\n" + "".join(f'a{n}: "x{n}" a{n + 1}\n' for n in range(size)) + f'a{size}: "y"')),
    Attack("regex of alternatives", COMPLETIONS, 6000, _grammar("regex", lambda size: "|".join(f"x{n}.*y" for n in range(size)))),
    Attack("regex that repeats", COMPLETIONS, 900, _grammar("regex", lambda size: f"(.*a.{{{size}}}b)*c")),
    Attack("choices", COMPLETIONS, 1024, _grammar("choice", lambda size: [f"{n:04d}" + "x" * 50 for n in range(size)])),
    Attack("schema of properties", COMPLETIONS, 1000, _grammar("json", lambda size: {"type": "object", "properties": {f"k{n}": {"type": "string", "pattern": f"a{{{n}}}"} for n in range(size)}})),
    Attack("schema of choices", COMPLETIONS, 1000, _grammar("json", lambda size: {"anyOf": [{"properties": {f"k{n}": {"type": "string"}}} for n in range(size)]})),
    Attack("schema of numbers", COMPLETIONS, 5000, _grammar("json", lambda size: {"enum": [f"{n:08d}" for n in range(size)]})),
    Attack("messages", CHAT, WHOLE // 40, lambda size: _chat(messages=[{"role": "user", "content": "x"}] * size)),
    Attack("content", CHAT, TEXT, lambda size: _chat(messages=[{"role": "user", "content": "a" * size}])),
    Attack("parts of a content", CHAT, WHOLE // 49, lambda size: _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a" * 16}] * size}])),
    Attack("a field's name", CHAT, WHOLE, lambda size: _chat(**{"a" * size: 1})),
    Attack("a value of a wrong type", CHAT, WHOLE // 3, lambda size: _chat(temperature=[1] * size)),
    Attack("role", CHAT, WHOLE, lambda size: _chat(messages=[{"role": "a" * size, "content": "x"}])),
    Attack("tools", CHAT, WHOLE // 90, lambda size: _chat(tools=[{"type": "function", "function": {"name": f"f{n}", "parameters": {}}} for n in range(size)])),
    Attack("chat_template_kwargs", CHAT, WHOLE // 14, lambda size: _chat(chat_template_kwargs={f"k{n}": 1 for n in range(size)})),
    Attack("prediction", CHAT, TEXT, lambda size: _chat(prediction={"type": "content", "content": "a" * size})),
    Attack("metadata", CHAT, WHOLE // 16, lambda size: _chat(metadata={f"k{n}": "1" for n in range(size)})),
    Attack("items", RESPONSES, WHOLE // 40, lambda size: _response(input=[{"role": "user", "content": "x"}] * size)),
    Attack("an item's name", RESPONSES, WHOLE, lambda size: _response(input=[{"role": "user", "content": "x", "a" * size: 1}])),
    Attack("an item's type", RESPONSES, WHOLE, lambda size: _response(input=[{"type": "a" * size}])),
    Attack("a text of an item", RESPONSES, TEXT, lambda size: _response(input=[{"role": "user", "content": "a" * size}])),
    Attack("parts of an item", RESPONSES, WHOLE // 49, lambda size: _response(input=[{"role": "user", "content": [{"type": "input_text", "text": "a" * 10}] * size}])),
    Attack("calls", RESPONSES, WHOLE // 80, lambda size: _response(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * size)),
    Attack("arguments", RESPONSES, WHOLE, lambda size: _response(input=[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}" + " " * size}])),
    Attack("turns to leave out", RESPONSES, 1024, lambda size: _response(truncation="auto", input=[*[{"role": "user", "content": "q1 " * 50}] * size, {"role": "user", "content": "q1 " * CONTEXT}])),
    Attack("thoughts", RESPONSES, WHOLE // 45, lambda size: _response(input=[{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}] * size}])),
    Attack("references", RESPONSES, WHOLE // 50, lambda size: _response(input=[{"type": "item_reference", "id": f"msg_{n:06d}_0"} for n in range(size)])),
    Attack("instructions", RESPONSES, TEXT, lambda size: _response(instructions="a" * size)),
    Attack("previous_response_id", RESPONSES, WHOLE, lambda size: _response(previous_response_id="a" * size)),
    Attack("include", RESPONSES, WHOLE // 34, lambda size: _response(include=["reasoning.encrypted_content"] * size)),
    Attack("functions", RESPONSES, WHOLE // 80, lambda size: _response(tools=[{"type": "function", "name": f"f{n}", "parameters": {}} for n in range(size)])),
    Attack("tool_choice", RESPONSES, WHOLE, lambda size: _response(tools=[{"type": "function", "name": "f"}], tool_choice={"type": "function", "name": "a" * size})),
    Attack("text.format", RESPONSES, 1000, lambda size: _response(text={"format": {"type": "json_schema", "name": "a", "schema": {"properties": {f"k{n}": {"type": "string"} for n in range(size)}}}})),
    Attack("dots in a name", RESPONSES, WHOLE, lambda size: _response(chat_template_kwargs={"." * size: 1})),
    Attack("message turns", COUNT, 20_000, lambda size: _count(messages=[{"role": "user", "content": "x"}] * size)),
    Attack("message blocks", COUNT, 20_000, lambda size: _count(messages=[{"role": "user", "content": [{"type": "text", "text": "ab"}] * size}])),
    Attack("message tool results", COUNT, 20_000, lambda size: _count(messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * size}])),
    Attack("message calls", MESSAGES, 10_000, lambda size: _message(messages=[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {}}] * size}])),
    Attack("message tools", COUNT, 16_000, lambda size: _count(tools=[{"name": f"f{n}", "input_schema": {}} for n in range(size)])),
    Attack("message text", MESSAGES, TEXT, lambda size: _message(system="a" * size)),
    Attack("stop_sequences", MESSAGES, WHOLE // 5, lambda size: _message(stop_sequences=["a"] * size)),
    Attack("counted text", COUNT, TEXT, lambda size: _count(system="a" * size)),
    Attack("rendered text", RENDER, TEXT, lambda size: _chat(messages=[{"role": "user", "content": "a" * size}])),
    Attack("infill suffix", INFILL, WHOLE, lambda size: json.dumps({"input_prefix": "x", "input_suffix": "a" * size}).encode()),
    Attack("infill files", INFILL, 30_000, lambda size: json.dumps({"input_prefix": "x", "input_suffix": "a", "input_extra": [{"text": "a"}] * size}).encode()),
    Attack("tokenize", TOKENIZE, CONTEXT, lambda size: json.dumps({"prompt": "x" * (size - 8), "return_token_strs": True}).encode()),
    Attack("detokenize", DETOKENIZE, CONTEXT, lambda size: json.dumps({"tokens": [5] * size}).encode()),
    Attack("gRPC prompt", GENERATE, TEXT, lambda size: _generate(prompt="a" * size)),
    Attack("gRPC ids", GENERATE, WHOLE, lambda size: pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * size)).SerializeToString()),
    Attack("gRPC messages", GENERATE, WHOLE, _messages),
    Attack("gRPC unknown fields", GENERATE, WHOLE, lambda size: b"\xd8\x3e\x01" * (size // 3)),
    Attack("gRPC stop strings", GENERATE, WHOLE, lambda size: _generate(sampling={"stop": [""] * (size // 2)})),
    Attack("gRPC stop_token_ids", GENERATE, WHOLE, lambda size: _generate(sampling={"stop_token_ids": [5] * size})),
    Attack("gRPC logit_bias", GENERATE, WHOLE, lambda size: _generate(sampling={"logit_bias": dict.fromkeys(range(size // 17), 1.0)})),
    Attack("gRPC bad_words", GENERATE, WHOLE, lambda size: _generate(sampling={"bad_words": [""] * (size // 2)})),
    Attack("gRPC allowed_token_ids", GENERATE, WHOLE, lambda size: _generate(sampling={"allowed_token_ids": [5] * size})),
    Attack("gRPC grammar", GENERATE, GRAMMAR, lambda size: _generate(sampling={"structured_outputs": pb.StructuredOutputs(grammar="\n" * size)})),
    Attack("gRPC choices", GENERATE, WHOLE, lambda size: _generate(sampling={"structured_outputs": pb.StructuredOutputs(choice=pb.Choices(choices=[""] * (size // 2)))})),
    Attack("gRPC prediction", GENERATE, TEXT, lambda size: _generate(prediction="a" * size)),
)  # fmt: skip


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], addresses: dict[str, str]) -> None:
        self._process = psutil.Process(process.pid)
        self._http, self._grpc = addresses["http"], addresses["public"]

    def cost(self, attack: Attack, size: int) -> Cost:
        """What the attack costs at this size."""
        body = attack.make(size)
        with self._asking() as waits:
            before = self._cpu_s()
            end = (
                self._grpc_end(attack.door, body)
                if attack.door.startswith(f"/{SERVICE}")
                else self._http_end(attack.door, body)
            )
            cpu_s = self._cpu_s() - before
        return Cost(cpu_s, max(waits), end)

    def idle_s(self, seconds: float = 1.0) -> float:
        """The longest wait for /health while nothing else is asked: what the machine's other work costs."""
        with self._asking() as waits:
            time.sleep(seconds)
        return max(waits)

    def _http_end(self, path: str, body: bytes) -> str:
        connection = http.client.HTTPConnection(self._http, timeout=_PATIENCE_S)
        connection.request("POST", path, body, {"content-type": "application/json", "host": "localhost"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return str(answer.status)

    def _grpc_end(self, method: str, body: bytes) -> str:
        with grpc.insecure_channel(self._grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
            try:
                for _ in channel.unary_stream(method)(body, timeout=_PATIENCE_S):
                    pass
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"

    def _cpu_s(self) -> float:
        """Of the server and of the processes that it has started."""
        total = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    @contextmanager
    def _asking(self) -> Iterator[list[float]]:
        """Ask for /health again and again; how long each answer took."""
        host, port = self._http.rsplit(":", 1)
        waits, over = list[float](), threading.Event()

        def ask() -> None:
            with socket.create_connection((host, int(port))) as connection:
                while not over.is_set():
                    began = time.perf_counter()
                    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    connection.recv(4096)
                    waits.append(time.perf_counter() - began)
                    time.sleep(0.003)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.05)
        try:
            yield waits
        finally:
            time.sleep(0.05)
            over.set()
            asking.join()


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """A server on a tiny model of a long context."""
    make_tiny_model(folder, max_position_embeddings=CONTEXT)

    command = [sys.executable, "-m", "tests.malformed_service", str(folder), *SETTINGS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Served(process, json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


def _main() -> None:
    named = sys.argv[1:]
    print(
        "| field | size | processor time at half | at the limit | longest wait for /health | end |\n|---|--:|--:|--:|--:|---|"
    )
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
        server.cost(ATTACKS[0], 1000)
        for attack in ATTACKS:
            if not named or any(name in attack.name for name in named):
                half, whole = server.cost(attack, attack.most // 2), server.cost(attack, attack.most)
                waited = max(half.health_s, whole.health_s)
                print(
                    f"| {attack.name} | {attack.most:,} | {half.cpu_s:.2f} s | {whole.cpu_s:.2f} s | {1000 * waited:.0f} ms | {whole.end} |",
                    flush=True,
                )


if __name__ == "__main__":
    _main()
