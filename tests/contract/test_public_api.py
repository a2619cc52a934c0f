"""The public API through the SDK and through bare gRPC, against the whole service on a tiny model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typing_extensions import override

import outrider
from outrider import AsyncClient, Client, Retry
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc
from services.access.key_records import hash_key
from services.api.config import PublicServerConfig
from services.api.grpc.server import SERVICE, serve_public
from speculation.errors import ConfigurationError
from tests.running.patience import until
from tests.running.refusals import refuses
from tests.servers.service import served

OPTIONS = {"max_tokens": 24, "ignore_eos": True}


async def in_thread(call: Callable[[], object]) -> object:
    return await asyncio.to_thread(call)


async def test_blocking_and_async_clients_agree(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:

        def blocking() -> outrider.Generation:
            with Client(address) as plain:
                return plain.generate("the quick", temperature=1.0, seed=5, **OPTIONS)

        first = await client.generate("the quick", temperature=1.0, seed=5, **OPTIONS)
        second = await in_thread(blocking)
        assert isinstance(second, outrider.Generation)
        assert second.token_ids == first.token_ids
        assert second.text == first.text
        assert first.usage.completion_tokens == len(first.token_ids) == 24
        assert first.finish_reason == "length"
        assert first.seed == 5
        assert first.model == "tiny"
        assert first.timing.total_s >= first.timing.time_to_first_token_s > 0


async def test_text_messages_and_token_ids_are_the_same_request(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        chat = await client.generate(messages=[{"role": "user", "content": "fox"}], **OPTIONS)
        text = await client.generate("<|user|>fox<|end|><|assistant|>", **OPTIONS)
        ids = await client.generate(token_ids=chat.prompt_token_ids, **OPTIONS)
        assert chat.prompt_token_ids == text.prompt_token_ids == ids.prompt_token_ids
        assert chat.token_ids == text.token_ids == ids.token_ids


async def test_a_stream_is_the_answer_in_pieces(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        whole = await client.generate("fox fox fox", **OPTIONS)
        stream = client.stream("fox fox fox", **OPTIONS)
        chunks = [chunk async for chunk in stream]
        assert stream.result is not None
        assert "".join(chunk.text for chunk in chunks) == stream.result.text == whole.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
        stats = stream.result.speculative_decoding
        assert stats.num_spec_steps == sum(1 for chunk in chunks if chunk.token_ids)
        assert (
            sum(count * index for index, count in enumerate(stats.acceptance_histogram)) == stats.num_accepted_draft_tokens
        )
        assert stats.num_accepted_draft_tokens + stats.num_spec_steps == 24
        assert stats.mean_acceptance_length == pytest.approx(24 / stats.num_spec_steps)


async def test_an_unset_seed_is_drawn_and_returned(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        first = await client.generate("fox", temperature=1.0, **OPTIONS)
        second = await client.generate("fox", temperature=1.0, **OPTIONS)
        again = await client.generate("fox", temperature=1.0, seed=first.seed, **OPTIONS)
        assert first.seed != second.seed
        assert again.token_ids == first.token_ids


async def test_stop_strings_end_text_tokens_and_counts_alike(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, running), AsyncClient(address) as client:
        whole = await client.generate("fox fox fox", max_tokens=40, ignore_eos=True, logprobs=0)
        middle = whole.text[len(whole.text) // 2 :][:3]
        cut = await client.generate("fox fox fox", max_tokens=40, ignore_eos=True, logprobs=0, stop=middle)
        assert cut.finish_reason == "stop"
        assert cut.stop == middle
        assert cut.text == whole.text[: whole.text.index(middle)]
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.usage.completion_tokens == len(cut.token_ids) == len(cut.logprobs)
        stats = cut.speculative_decoding
        assert stats.num_spec_steps * stats.mean_acceptance_length == pytest.approx(len(cut.token_ids))
        await until(lambda: not running.verifier.loop.running)


async def test_stop_strings_wait_for_min_tokens(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        whole = await client.generate("fox fox", max_tokens=30, ignore_eos=True)
        early = whole.text[1]
        late = await client.generate("fox fox", max_tokens=30, ignore_eos=True, stop=early, min_tokens=30)
        assert late.text == whole.text
        assert late.usage.completion_tokens == 30


async def test_max_tokens_defaults_to_what_the_context_leaves(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        short = await client.generate(token_ids=[5] * 500, ignore_eos=True)
        assert short.usage.completion_tokens == 12
        assert short.finish_reason == "length"
        with refuses(
            outrider.InvalidArgument,
            field="max_tokens",
            value=13,
            allowed="at most 12, what the prompt leaves: this model's maximum context length is 512 tokens",
        ) as caught:
            await client.generate(token_ids=[5] * 500, max_tokens=13)
        assert caught.value.field == "max_tokens"


BAD: list[tuple[str, dict[str, object]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt_token_ids", {"token_ids": []}),
    ("messages", {"messages": []}),
    ("prompt_token_ids", {"token_ids": [5, 4000]}),
    ("prompt", {"token_ids": [5] * 512}),
    ("messages[0]", {"messages": [{"role": "user"}]}),
    ("messages[0].role", {"messages": [{"role": "", "content": "x"}]}),
    ("temperature", {"prompt": "x", "temperature": -1.0}),
    ("temperature", {"prompt": "x", "temperature": float("nan")}),
    ("temperature", {"prompt": "x", "temperature": "warm"}),
    ("top_k", {"prompt": "x", "top_k": -1}),
    ("top_p", {"prompt": "x", "top_p": 1.5}),
    ("max_tokens", {"prompt": "x", "max_tokens": 0}),
    ("max_tokens", {"prompt": "x", "max_tokens": 10_000}),
    ("min_tokens", {"prompt": "x", "max_tokens": 5, "min_tokens": 6}),
    ("stop", {"prompt": "x", "stop": ["a"] * 17}),
    ("stop", {"prompt": "x", "stop": [""]}),
    ("stop_token_ids", {"prompt": "x", "stop_token_ids": [9999]}),
    ("logit_bias", {"prompt": "x", "logit_bias": {9999: 1.0}}),
    ("logprobs", {"prompt": "x", "logprobs": 21}),
    ("seed", {"prompt": "x", "seed": -1}),
    ("speculation.strategy", {"prompt": "x", "strategy": "magic"}),
    ("speculation.num_speculative_tokens", {"prompt": "x", "num_speculative_tokens": 513}),
    ("acceptance", {"prompt": "x", "acceptance": "maybe"}),
    ("model", {"prompt": "x", "model": "gpt-9"}),
    ("nonsense", {"prompt": "x", "nonsense": 1}),
    ("request", {"prompt": "x" * (5 << 20)}),
    ("prompt", {}),
]


async def test_bad_input_is_refused_by_name_and_harms_nobody(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, running), AsyncClient(address) as client:
        good = await client.generate("fox", **OPTIONS)
        for field, arguments in BAD:
            with pytest.raises(outrider.InvalidArgument) as caught:
                await client.generate(**arguments)  # type: ignore[arg-type]
            assert caught.value.field == field, arguments
            assert str(caught.value)
        assert (await client.generate("fox", **OPTIONS)).token_ids == good.token_ids
        pool = (await running.verifier.describe()).free_blocks, (await running.verifier.describe()).total_blocks
        assert pool[0] == pool[1]
        with pytest.raises(outrider.NotFound):
            await client.generate("x", model="gpt-9")


async def test_bare_grpc_gets_the_same_refusals(tiny_model: Path) -> None:
    cases = [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "input is unset"),
        (pb.GenerateRequest(prompt=""), grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty"),
        (pb.GenerateRequest(prompt="x", model="y"), grpc.StatusCode.NOT_FOUND, "model is y"),
        (
            pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1] * 600)),
            grpc.StatusCode.OUT_OF_RANGE,
            "at most 511 tokens",
        ),
        (pb.GenerateRequest(prompt="x" * (5 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ]
    async with served(tiny_model) as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for wanted, code, message in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(wanted):
                    pass
            assert caught.value.code() is code
            assert message in (caught.value.details() or "")


async def test_a_client_that_vanishes_leaves_nothing_behind(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, running):
        for leave in (stop_reading, close_channel):
            await leave(address)
            await until(lambda: not (running.verifier.loop.running or running.drafter.sessions))
            card = await running.verifier.describe()
            assert card.free_blocks == card.total_blocks


async def stop_reading(address: str) -> None:
    async with AsyncClient(address) as client, client.stream("fox", max_tokens=400, ignore_eos=True) as stream:
        async for _ in stream:
            break


async def close_channel(address: str) -> None:
    client = AsyncClient(address)
    stream = client.stream("fox", max_tokens=400, ignore_eos=True)
    await anext(stream)
    await client.close()
    await stream.aclose()


async def test_a_call_ends_at_its_deadline_and_frees_the_verifier(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, running), AsyncClient(address) as client:
        with pytest.raises(outrider.DeadlineExceeded):
            await client.generate("fox", max_tokens=500, ignore_eos=True, timeout_s=0.05)
        await until(lambda: not running.verifier.loop.running)
        with pytest.raises(outrider.DeadlineExceeded):
            await client.generate("fox", max_tokens=1, timeout_s=0)
        with Client(address, timeout_s=0) as impatient, pytest.raises(outrider.DeadlineExceeded):
            await asyncio.to_thread(impatient.generate, "fox", max_tokens=1)


async def test_health_and_reflection(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), grpc.aio.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        listed = (await health.List(health_pb2.HealthListRequest())).statuses
        assert {listed[name].status for name in ("", "liveness")} == {health_pb2.HealthCheckResponse.SERVING}
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            assert SERVICE in [service.name for service in answer.list_services_response.service]
            break


async def test_a_model_is_told_with_its_strategies(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        (model,) = await client.models()
        assert model.name == "tiny"
        assert model.max_model_len == 512
        assert model.default_strategy in model.strategies
        assert "autoregressive" in model.strategies


async def test_a_models_generation_config_counts_unless_a_request_says_otherwise(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    content = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 20, "min_new_tokens": 20, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **content}))
    async with served(folder) as (address, _), AsyncClient(address) as client:
        (model,) = await client.models()
        assert model.defaults == {"temperature": 0.8, "top_k": 50, "max_tokens": 20, "min_tokens": 20}
        assert model.processors == {"no_repeat_ngram_size": "1"}
        prompt = [40, 41, 42]
        sampled = await client.generate(token_ids=prompt, seed=1)
        assert len(sampled.token_ids) == 20
        # No token comes twice, those of the prompt included.
        assert len({*sampled.token_ids, *prompt}) == 23
        same = await client.generate(token_ids=prompt, seed=1, temperature=0.8, top_k=50, max_tokens=20, min_tokens=20)
        assert same.token_ids == sampled.token_ids
        greedy = await client.generate(token_ids=prompt, seed=1, temperature=0)
        assert greedy.token_ids == (await client.generate(token_ids=prompt, seed=2, temperature=0)).token_ids
        assert greedy.token_ids != sampled.token_ids
        plain = await client.generate(token_ids=prompt, ignore_generation_config=True, ignore_eos=True)
        assert len(plain.token_ids) == 256
        assert len(set(plain.token_ids)) < 256
    async with served(tiny_model) as (address, _), AsyncClient(address) as client:
        (model,) = await client.models()
        assert (model.defaults, model.processors) == ({}, {})
        assert (await client.generate(token_ids=prompt, ignore_eos=True)).token_ids == plain.token_ids


async def test_calls_without_the_right_key_are_refused(tiny_model: Path) -> None:
    key = "k" * 20
    config = PublicServerConfig(port=0, api_key_hashes=(hash_key(key),))
    async with served(tiny_model, config=config) as (address, _):
        async with AsyncClient(address, api_key=key) as client:
            assert (await client.generate("fox", **OPTIONS)).usage.completion_tokens == 24
            assert await client.models()
        for wrong in (None, "wrong", key[:-1]):
            async with AsyncClient(address, api_key=wrong) as client:
                with pytest.raises(outrider.Unauthenticated, match="Bearer"):
                    await client.generate("fox")
                with pytest.raises(outrider.Unauthenticated):
                    await client.models()
        async with grpc.aio.insecure_channel(address) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_what_is_remembered_of_a_caller_can_be_deleted(tiny_model: Path) -> None:
    keys = ("k" * 20, "l" * 20)
    config = PublicServerConfig(port=0, api_key_hashes=tuple(hash_key(key) for key in keys))
    options = {**OPTIONS, "strategy": "suffix", "temperature": 1.0, "seed": 4}
    async with served(tiny_model, "drafter.suffix_cached_tokens=1000", "verifier.draft_deadline_s=10", config=config) as (
        address,
        running,
    ):

        async def drafted(client: AsyncClient) -> int:
            """Accepted nodes of one and the same answer."""
            return (await client.generate("fox", **options)).speculative_decoding.num_accepted_draft_tokens

        async with AsyncClient(address, api_key=keys[0]) as one, AsyncClient(address, api_key=keys[1]) as two:
            first = await drafted(one)
            assert await drafted(one) > first + 5
            assert await drafted(two) == first
            assert running.verifier._target.blocks.cached == 0
            await one.generate("fox " * 100, **options)
            cached = running.verifier._target.blocks.cached
            assert cached > 0
            await one.forget()
            assert await drafted(one) == first
            assert await drafted(two) > first + 5
            assert running.verifier._target.blocks.cached < cached

            def blocking() -> None:
                with Client(address, api_key=keys[1]) as plain:
                    plain.forget()

            await in_thread(blocking)
            assert await drafted(two) == first
        async with AsyncClient(address) as nobody:
            with pytest.raises(outrider.Unauthenticated):
                await nobody.forget()


async def test_nothing_is_open_to_others_without_keys(tiny_model: Path) -> None:
    async with served(tiny_model) as (address, running):
        with refuses(ConfigurationError, field="server.host", value="0.0.0.0"):
            await serve_public(running.router, PublicServerConfig(host="0.0.0.0", port=0))
        port = int(address.rpartition(":")[2])
        with refuses(ConfigurationError, says="cannot listen"):
            await serve_public(running.router, PublicServerConfig(port=port))


async def test_retries_before_the_first_token_only() -> None:
    client = AsyncClient("127.0.0.1:1", retry=Retry(attempts=3, first_delay_s=0.01))
    with pytest.raises(outrider.Unavailable, match="outrider serve"):
        await client.generate("fox")
    await client.close()


class Flaky(generation_pb2_grpc.GenerationServiceServicer):
    """Fails as it is told, and counts."""

    def __init__(self, tokens_first: bool) -> None:
        self.calls = 0
        self.tokens_first = tokens_first

    @override
    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.calls += 1
        if self.tokens_first:
            yield pb.GenerateResponse(chunk=pb.Chunk(text="a", token_ids=[1]))
        elif self.calls == 3:
            yield pb.GenerateResponse(complete=pb.Complete(finish_reason=pb.FINISH_REASON_STOP))
            return
        await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")


@pytest.mark.parametrize(("tokens_first", "calls"), [(False, 3), (True, 1)])
async def test_how_often_a_call_is_tried(tokens_first: bool, calls: int) -> None:
    server, servicer = grpc.aio.server(), Flaky(tokens_first)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address, retry = f"127.0.0.1:{port}", Retry(attempts=3, first_delay_s=0.01)

    def blocking() -> None:
        with Client(address, retry=retry) as client:
            client.generate("x")

    async def run_async() -> None:
        async with AsyncClient(address, retry=retry) as client:
            await client.generate("x")

    runs: list[Callable[[], Awaitable[object]]] = [lambda: in_thread(blocking), run_async]
    for run in runs:
        servicer.calls = 0
        if tokens_first:
            with pytest.raises(outrider.Unavailable):
                await run()
        else:
            await run()
        assert servicer.calls == calls
    await server.stop(None)
