"""One suite over both retrieval links, and a service that changes versions under load; Redis may come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc.aio
import pytest
from typing_extensions import override

from outrider.internal.v1 import retrieval_pb2, retrieval_pb2_grpc
from retrieval_index.manifest import FILE
from retrieval_index.store import IndexStore
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links import grpc_retrieval
from services.links.grpc_retrieval import GrpcRetrievalLink, serve_retrieval
from services.links.in_process import InProcessRetrievalLink
from services.retrieval import service as retrieval_service
from services.retrieval.config import RetrievalConfig
from services.retrieval.service import RetrievalService
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, Unavailable
from speculation.messages import Draft, OpenSession, RetrievalQuery, Retrieved
from speculation.ports import Retriever
from speculation.types import Features
from tests.drafters.indexes import STATES, TARGET, build, encode
from tests.running.patience import PATIENCE_S, until
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.redis_servers import KINDS, server


def query(text: str, most: int = 8, length: int = 6) -> RetrievalQuery:
    return RetrievalQuery(suffix=tuple(encode(text)), max_continuations=most, max_length=length)


def of_state(after: str, chosen: str) -> RetrievalQuery:
    state = Features(data=STATES[ord(after)].astype("<f2").tobytes(), rows=1, width=STATES.shape[1], dtype="float16")
    return RetrievalQuery(suffix=tuple(encode(chosen)), max_continuations=8, max_length=6, state=state)


@asynccontextmanager
async def in_process(service: RetrievalService) -> AsyncIterator[Retriever]:
    yield InProcessRetrievalLink(service)


@asynccontextmanager
async def over_grpc(service: RetrievalService) -> AsyncIterator[Retriever]:
    running, port = await serve_retrieval(service, "127.0.0.1:0", "a-token-of-sixteen")

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link = GrpcRetrievalLink(resolve, "a-token-of-sixteen")
    await link.start()
    await answered(link)
    yield link
    await link.stop()
    await running.stop(None)


async def answered(link: Retriever) -> None:
    """Wait until there is a service that answers, whatever it says."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await link.retrieve(query("ab"))
                return
            except Unavailable as error:
                if "not there" not in str(error):
                    return
                await asyncio.sleep(0.02)


LINKS = (in_process, over_grpc)


@asynccontextmanager
async def service(config: RetrievalConfig) -> AsyncIterator[RetrievalService]:
    running = RetrievalService(config)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


async def test_both_links_answer_alike(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcdX", "abcdY1", "abcdY2"], semantic=True)
    asked = [query("abcd"), query("cd", 1), query("nothing"), query("", 1, 1), of_state("c", "d"), of_state("c", "X")]
    async with service(RetrievalConfig(index=tmp_path / "i", state_width=STATES.shape[1])) as running:
        seen = []
        for link in LINKS:
            async with link(running) as retriever:
                one_by_one = [await retriever.retrieve(each) for each in asked]
                together = await asyncio.gather(*(retriever.retrieve(each) for each in asked * 100))
                assert together == one_by_one * 100
                with pytest.raises(OutriderError):
                    await retriever.retrieve(RetrievalQuery(suffix=(1,) * 65, max_continuations=1, max_length=1))
                seen.append(one_by_one)
        assert seen[0] == seen[1]
        assert seen[0][0].continuations
        assert {bytes(hit.tokens).decode() for hit in seen[0][4].continuations} == {"X", "Y1", "Y2"}
        assert not seen[0][5].continuations


async def test_who_asks_last_of_one_that_answers_nobody_is_told_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_retrieval, "_MOST_UNANSWERED", 2)
    never = asyncio.Event()

    class Silent(retrieval_pb2_grpc.RetrievalServiceServicer):
        @override
        async def Retrieve(self, request_iterator: object, context: object) -> AsyncIterator[retrieval_pb2.RetrieveResponse]:
            await never.wait()
            yield retrieval_pb2.RetrieveResponse()

    running = grpc.aio.server()
    retrieval_pb2_grpc.add_RetrievalServiceServicer_to_server(Silent(), running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link = GrpcRetrievalLink(resolve)
    await link.start()
    await until(lambda: link.channel is not None)
    asked = []
    for _ in range(3):
        asked.append(asyncio.create_task(link.retrieve(query("ab"))))
        # Each in a message of its own.
        await asyncio.sleep(0.05)
    async with asyncio.timeout(PATIENCE_S):
        ended = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in ended)
    await link.stop()
    await running.stop(None)


async def test_who_asks_is_told_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(tmp_path / "i", ["abcdX"])
    caplog.set_level(logging.DEBUG, "services.retrieval")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with service(RetrievalConfig(index=tmp_path / "i")) as running:
        for number, link in enumerate(LINKS):
            async with link(running) as retriever:
                drafter = DrafterService(DrafterConfig(retrieval_deadline_s=PATIENCE_S), retriever)
                name = f"mine.{number}"
                opening = OpenSession(
                    session_id=name,
                    tokens=tuple(encode("abcd")),
                    prompt_length=4,
                    sources=("retrieval",),
                    max_nodes=4,
                    traceparent=trace,
                )
                drafted = await drafter.open(opening)
                assert isinstance(drafted, Draft)
                assert bytes(drafted.tree.tokens).decode() == "X"
            assert any(name in line and trace in line for line in caplog.messages)


async def test_a_state_of_another_model_finds_nothing_and_harms_nobody(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcdX"], semantic=True)
    foreign = replace(query("d"), state=Features(data=bytes(16), rows=1, width=8, dtype="float16"))
    broken = replace(query("d"), state=Features(data=bytes(15), rows=1, width=8, dtype="float16"))
    async with service(RetrievalConfig(index=tmp_path / "i", state_width=STATES.shape[1])) as running:
        for link in LINKS:
            async with link(running) as retriever:
                bad, good = await asyncio.gather(retriever.retrieve(foreign), retriever.retrieve(query("abcd")))
                assert not bad.continuations
                assert good.continuations
                with pytest.raises(OutriderError):
                    await retriever.retrieve(broken)


async def test_large_states_are_spread_over_messages() -> None:
    class Silent:
        def look_up(self, queries: list[RetrievalQuery]) -> list[Retrieved]:
            return [Retrieved() for _ in queries]

    large = replace(query("d"), state=Features(data=bytes(2 * 16384), rows=1, width=16384, dtype="float16"))
    async with over_grpc(Silent()) as retriever:  # type: ignore[arg-type]
        assert len(await asyncio.gather(*(retriever.retrieve(large) for _ in range(300)))) == 300


async def test_what_is_asked_together_shares_messages(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcdX"])
    sizes = []

    class Counting:
        def look_up(self, queries: list[RetrievalQuery]) -> list[Retrieved]:
            sizes.append(len(queries))
            return [Retrieved() for _ in queries]

    async with over_grpc(Counting()) as retriever:  # type: ignore[arg-type]
        sizes.clear()
        await asyncio.gather(*(retriever.retrieve(query("ab")) for _ in range(40)))
    assert sum(sizes) == 40
    assert len(sizes) <= 2


async def test_a_service_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    build(tmp_path / "i", ["abcdX"])
    port = free_port()

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link = GrpcRetrievalLink(resolve)
    await link.start()
    with pytest.raises(Unavailable):
        await link.retrieve(query("abcd"))
    async with service(RetrievalConfig(index=tmp_path / "i")) as running:
        for _ in range(2):
            listening, _ = await serve_retrieval(running, f"127.0.0.1:{port}")
            await answered(link)
            assert (await link.retrieve(query("abcd"))).continuations
            await listening.stop(None)
            await until(lambda: link._asked is None)
            with pytest.raises(Unavailable):
                await link.retrieve(query("abcd"))
    await link.stop()


async def test_too_large_a_batch_is_refused() -> None:
    from services.links.codec.retrieval import decode_queries, encode_queries

    with refuses(InvalidArgument, field="queries", value="257 long"):
        decode_queries(encode_queries(1, [query("ab")] * 257))
    with refuses(InvalidArgument, field="query.max_length", value="65 long"):
        decode_queries(encode_queries(1, [query("ab", 1, 65)]))


@pytest.mark.parametrize("kind", KINDS)
async def test_versions_change_under_load_and_nobody_notices(tmp_path: Path, kind: str) -> None:
    for number in range(4):
        build(tmp_path / str(number), [f"abcd{number}"])
    with server(kind, tmp_path) as url, IndexStore(url, "i") as store:
        config = RetrievalConfig(
            redis_url=url, name="i", cache_dir=tmp_path / "cache", tokenizer_sha256=TARGET.tokenizer_sha256
        )
        async with service(config) as running:
            with pytest.raises(Unavailable, match="no index is loaded"):
                await running.retrieve(query("abcd"))
            first = await asyncio.to_thread(store.publish, tmp_path / "0")
            await until(lambda: running.version == first)
            answers: list[str] = []
            done = False

            async def ask() -> None:
                async with over_grpc(running) as retriever:
                    while not done:
                        found = await retriever.retrieve(query("abcd"))
                        (hit,) = found.continuations
                        answers.append(bytes(hit.tokens).decode())

            asking = asyncio.create_task(ask())
            await until(lambda: bool(answers))
            for number in (1, 2, 3):
                version = await asyncio.to_thread(store.publish, tmp_path / str(number))
                await until(lambda version=version: running.version == version)
                await until(lambda number=number: answers[-1] == str(number))
            await asyncio.to_thread(store.rollback)
            await until(lambda: running.switches == 5)
            await until(lambda: answers[-1] == "2")
            done = True
            await asking
            changes = [answers[0], *(after for before, after in pairwise(answers) if after != before)]
            assert changes == ["0", "1", "2", "3", "2"]
            # Of what has been fetched, the version in use and the one before it are kept.
            kept = {
                folder.name for folder in (tmp_path / "cache").rglob("*") if folder.is_dir() and (folder / FILE).exists()
            }
            assert kept == {running.version, version}


async def test_an_unusable_version_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    build(tmp_path / "good", ["abcdX"])
    build(tmp_path / "foreign", ["abcdY"], target=replace(TARGET, tokenizer_sha256="b" * 64))
    with server("embedded", tmp_path) as url, IndexStore(url, "i") as store:
        good = store.publish(tmp_path / "good")
        config = RetrievalConfig(
            redis_url=url, name="i", cache_dir=tmp_path / "cache", tokenizer_sha256=TARGET.tokenizer_sha256
        )
        async with service(config) as running:
            await until(lambda: running.version == good)
            await asyncio.to_thread(store.publish, tmp_path / "foreign")
            await until(lambda: running.refused is not None)
            assert "built for the tokenizer" in str(running.refused)
            assert running.version == good
            assert (await running.retrieve(query("abcd"))).continuations


async def test_a_refused_version_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_service, "_REFUSED_FIRST_S", 0.1)
    monkeypatch.setattr(retrieval_service, "_WATCH_S", 0.1)
    build(tmp_path / "0", ["abcd0"])
    with server("embedded", tmp_path) as url, IndexStore(url, "i") as store:
        version = store.publish(tmp_path / "0")
        with monkeypatch.context() as patched:

            def unusable(*_: object) -> None:
                raise ConfigurationError("no room here")

            patched.setattr(retrieval_service, "Index", unusable)
            running = RetrievalService(RetrievalConfig(redis_url=url, name="i", cache_dir=tmp_path / "cache"))
            await running.start()
            await until(lambda: running.refused is not None)
        # Nobody publishes anything meanwhile.
        await until(lambda: running.version == version)
        await running.stop()


async def test_redis_may_vanish_and_come_back(tmp_path: Path) -> None:
    for number in range(2):
        build(tmp_path / str(number), [f"abcd{number}"])
    with server("embedded", tmp_path) as url:
        with IndexStore(url, "i") as store:
            first = store.publish(tmp_path / "0")
        config = RetrievalConfig(redis_url=url, name="i", cache_dir=tmp_path / "cache")
        running = RetrievalService(config)
        await running.start()
        await until(lambda: running.version == first)
    # Redis is gone: what is loaded serves on.
    await until(lambda: running.refused is not None)
    assert (await running.retrieve(query("abcd"))).index_version == first
    await running.stop()
    # And who starts without it serves what was live when it was last seen.
    async with service(config) as later:
        await until(lambda: later.version == first)
        assert (await later.retrieve(query("abcd"))).continuations


async def test_one_place_for_the_index(tmp_path: Path) -> None:
    for config in (RetrievalConfig(), RetrievalConfig(index=tmp_path, redis_url="redis://x")):
        with refuses(ConfigurationError, field="retrieval.index and retrieval.redis_url"):
            await RetrievalService(config).start()
    with refuses(ConfigurationError, says="holds no index"):
        await RetrievalService(RetrievalConfig(index=tmp_path)).start()
