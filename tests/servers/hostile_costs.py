"""What one request can cost: every field that a caller fills, on every door, at its limit and at half of it.

``python -m tests.servers.hostile_costs [NAME ...]`` prints the table of docs/log.md. The server runs in a process of its own, on a
tiny model with a long context; while a request is answered, others ask whether the server lives, and one reads a stream.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.internal.v1 import drafting_pb2, retrieval_pb2, verification_pb2
from outrider.v1 import generation_pb2 as pb
from services.api.grpc.server import SERVICE
from speculation.limits import (
    MAX_DRAFT_MESSAGE_BYTES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PUBLIC_MESSAGE_BYTES,
    MAX_SESSION_TOKENS,
)
from tests.servers.attacked_server import CONTEXT, served

# Bytes of a body, beside its frame; characters of a grammar.
WHOLE, GRAMMAR, TEXT = MAX_PUBLIC_MESSAGE_BYTES - 4096, MAX_GRAMMAR_CHARACTERS, 13 * CONTEXT
# Bytes of a message between components, beside its frame: a router sends a verifier no more ids than a caller sent it.
VERIFY_WHOLE, DRAFT_WHOLE = WHOLE, MAX_DRAFT_MESSAGE_BYTES - 4096


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


def _tool(parameters: dict[str, Any], name: str = "f", **how: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **how}}


def _called(arguments: str = "{}") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


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
VERIFY = "/outrider.internal.v1.VerificationService/Verify"
DRAFT = "/outrider.internal.v1.DraftingService/Draft"
RETRIEVE = "/outrider.internal.v1.RetrievalService/Retrieve"


def _verify(sampling: dict[str, Any] | None = None, **fields: Any) -> bytes:
    given: dict[str, Any] = {"request_id": "r.0", "prompt_token_ids": [5], **fields}
    chosen = verification_pb2.SamplingParams(max_tokens=1, top_p=1.0, repetition_penalty=1.0, **(sampling or {}))
    return verification_pb2.VerifyRequest(sampling=chosen, plan=_PLAN, **given).SerializeToString()


_PLAN = verification_pb2.Plan(strategy="autoregressive", acceptance="walk")


def _draft(**events: Any) -> bytes:
    return drafting_pb2.DraftRequest(**events).SerializeToString()


def _opened(**fields: Any) -> bytes:
    given: dict[str, Any] = {
        "session_id": "s",
        "tokens": [5],
        "prompt_length": 1,
        "sources": ["prompt_lookup"],
        "max_nodes": 8,
        **fields,
    }
    return _draft(open=drafting_pb2.OpenSession(**given))


def _queries(queries: list[Any]) -> bytes:
    return retrieval_pb2.RetrieveRequest(batch_id=1, queries=queries).SerializeToString()


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
    Attack("patterns beside names", CHAT, 1000, lambda size: _chat(tools=[_tool({"type": "object", "properties": {f"n{n}": {} for n in range(size)}, "patternProperties": {f"^x{n}$": {} for n in range(size)}})], tool_choice="required")),
    Attack("tools that share definitions", CHAT, 2000, lambda size: _chat(tools=[_tool({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(size)}, "$defs": {f"d{n}": {"type": "integer"} for n in range(size)}}, strict=True)])),
    Attack("tools of no form", CHAT, 127, lambda size: _chat(tools=[*(_tool({"type": "string", "pattern": "(.*a.{900}b)*c"}, f"f{n}") for n in range(size)), _tool({"type": "hiccup"}, "g")], tool_choice="required")),
    Attack("calls of a message", CHAT, 9000, lambda size: _chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [_called()] * size}, {"role": "user", "content": "x"}])),
    Attack("a cut call", CHAT, 100_000, lambda size: _chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [_called("{" + ", ".join(f'"k{n}": 1' for n in range(size)))]}, {"role": "user", "content": "x"}])),
    Attack("allowed_token_ids of many choices", COMPLETIONS, WHOLE // 6, lambda size: _completion(allowed_token_ids=[n % 300 for n in range(size)], n=128, temperature=1)),
    Attack("bad words of many choices", COMPLETIONS, 256, lambda size: _completion(bad_words=[f"{n:03d}" for n in range(size)], n=128, temperature=1, max_tokens=32)),
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
    # It is computed, at the price of attention over it.
    Attack("verifier: prompt", VERIFY, 8192, lambda size: _verify(prompt_token_ids=[5] * size)),
    Attack("verifier: too long a prompt", VERIFY, VERIFY_WHOLE, lambda size: _verify(prompt_token_ids=[5] * size)),
    Attack("verifier: request_id", VERIFY, VERIFY_WHOLE, lambda size: _verify(request_id="a" * size)),
    Attack("verifier: tenant", VERIFY, VERIFY_WHOLE, lambda size: _verify(tenant="a" * size)),
    Attack("verifier: cache_salt", VERIFY, VERIFY_WHOLE, lambda size: _verify(cache_salt="a" * size)),
    Attack("verifier: stop_token_ids", VERIFY, VERIFY_WHOLE, lambda size: _verify({"stop_token_ids": [5] * size})),
    Attack("verifier: stop", VERIFY, VERIFY_WHOLE, lambda size: _verify({"stop": [""] * (size // 2)})),
    Attack("verifier: logit_bias", VERIFY, VERIFY_WHOLE, lambda size: _verify({"logit_bias": dict.fromkeys(range(size // 17), 1.0)})),
    Attack("verifier: allowed_token_ids", VERIFY, VERIFY_WHOLE, lambda size: _verify({"allowed_token_ids": [5] * size})),
    Attack("verifier: bad_words", VERIFY, VERIFY_WHOLE, lambda size: _verify({"bad_words": [verification_pb2.TokenSequence(token_ids=[5])] * (size // 5)})),
    Attack("verifier: grammar", VERIFY, GRAMMAR, lambda size: _verify({"structured_outputs": verification_pb2.StructuredOutputs(kind="grammar", text="\n" * size)})),
    Attack("verifier: sources", VERIFY, VERIFY_WHOLE, lambda size: verification_pb2.VerifyRequest(plan=verification_pb2.Plan(sources=[""] * (size // 2))).SerializeToString()),
    Attack("drafter: tokens", DRAFT, MAX_SESSION_TOKENS, lambda size: _opened(tokens=[n % 300 for n in range(size)], prompt_length=size)),
    Attack("drafter: equal tokens", DRAFT, MAX_SESSION_TOKENS // 4, lambda size: _opened(tokens=[5] * size, prompt_length=size, sources=["prompt_lookup", "suffix", "recycling", "lookahead", "anpd"])),
    Attack("drafter: prediction", DRAFT, MAX_SESSION_TOKENS, lambda size: _opened(prediction_token_ids=[5] * size)),
    Attack("drafter: sources", DRAFT, DRAFT_WHOLE, lambda size: _opened(sources=[""] * (size // 2))),
    Attack("drafter: session_id", DRAFT, DRAFT_WHOLE, lambda size: _opened(session_id="a" * size)),
    Attack("drafter: committed", DRAFT, DRAFT_WHOLE, lambda size: _draft(step=drafting_pb2.StepReport(session_id="s", committed=[5] * size, length=size))),
    Attack("drafter: top_ids", DRAFT, DRAFT_WHOLE, lambda size: _draft(step=drafting_pb2.StepReport(session_id="s", observation=drafting_pb2.Observation(top_ids=[drafting_pb2.TopIds()] * (size // 2))))),
    Attack("drafter: features", DRAFT, DRAFT_WHOLE, lambda size: _draft(features=drafting_pb2.FeatureChunk(session_id="s", features=drafting_pb2.Features(data=b"a" * size, rows=1, width=size // 2)))),
    Attack("retrieval: queries", RETRIEVE, DRAFT_WHOLE, lambda size: _queries([retrieval_pb2.Query()] * (size // 2))),
    Attack("retrieval: suffix", RETRIEVE, DRAFT_WHOLE, lambda size: _queries([retrieval_pb2.Query(suffix=[5] * size)])),
    Attack("retrieval: state", RETRIEVE, DRAFT_WHOLE, lambda size: _queries([retrieval_pb2.Query(state=drafting_pb2.Features(data=b"a" * size, rows=1, width=size // 2))])),
)  # fmt: skip


def _main() -> None:
    named = sys.argv[1:]
    print(
        "| field | size | processor time at half | at the limit | longest wait for /health | a stream's longest gap | end |\n"
        "|---|--:|--:|--:|--:|--:|---|"
    )
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
        server.cost(ATTACKS[0], 1000)
        for attack in ATTACKS:
            if not named or any(name in attack.name for name in named):
                half, whole = server.cost(attack, attack.most // 2), server.cost(attack, attack.most)
                waited, gap_s = max(half.health_s, whole.health_s), server.victims_gap_s(attack, attack.most)
                print(
                    f"| {attack.name} | {attack.most:,} | {half.cpu_s:.2f} s | {whole.cpu_s:.2f} s | {1000 * waited:.0f} ms | {1000 * gap_s:.0f} ms | {whole.end} |",
                    flush=True,
                )


if __name__ == "__main__":
    _main()
