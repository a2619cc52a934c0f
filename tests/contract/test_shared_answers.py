"""Answers that drafters share through Redis: in process and over gRPC, bounded, sealed by tenant, really forgotten."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import redis

from cluster.settings.config import Settings, load
from retrieval_index.access import READER, keeper_rules, rules
from retrieval_index.answers import RedisAnswers
from services.drafter.config import DrafterConfig, SuffixConfig
from services.drafter.service import DrafterService
from services.drafter.sessions import shared_answers
from services.links.grpc_answers import GrpcAnswersLink, serves
from services.links.grpc_retrieval import GrpcRetrievalLink, serve_retrieval
from services.retrieval.config import AnswersConfig, RetrievalConfig
from services.retrieval.service import RetrievalService
from services.settings import filled
from speculation import limits
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, Unavailable
from speculation.messages import CloseSession, Draft, ForgetTenant
from speculation.ports import AnswerStore
from tests.drafters.drafter_sessions import opening, report
from tests.running.patience import PATIENCE_S, until
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.redis_servers import server, started

ANSWER = (71_001, 71_002, 71_003, 71_004, 71_005)
MARKER = array("i", ANSWER[:3]).tobytes()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with server("embedded", tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session asks for the answers of others."""
    monkeypatch.setattr(shared_answers, "_EVERY_S", 0.0)


@asynccontextmanager
async def store(url: str, name: str, **wanted: Any) -> AsyncIterator[RedisAnswers]:
    found = RedisAnswers(url, name, **{"tokenizer": "t", "max_tokens": 1000, "kept_s": 3600.0, **wanted})
    try:
        yield found
    finally:
        await found.close()


@asynccontextmanager
async def over_grpc(kept: AnswerStore | None) -> AsyncIterator[GrpcAnswersLink]:
    token = "a-token-of-sixteen"
    serving, port = await serve_retrieval(RetrievalService(RetrievalConfig()), "127.0.0.1:0", token, further=serves(kept))

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link = GrpcRetrievalLink(resolve, token)
    await link.start()
    await until(lambda: link.channel)
    try:
        yield GrpcAnswersLink(link, token)
    finally:
        await link.stop()
        await serving.stop(None)


def drafter(kept: AnswerStore) -> DrafterService:
    return DrafterService(DrafterConfig(suffix=SuffixConfig(max_cached_tokens=10_000)), answers=kept)


def outcomes(service: DrafterService, what: str) -> int:
    assert service.shared is not None
    return service.shared.outcomes[what]


async def answered(service: DrafterService, name: str, tenant: str, answer: tuple[int, ...] = ANSWER) -> None:
    """A request of a tenant that answers so, and whose answer has been kept or lost."""
    known = outcomes(service, "kept") + outcomes(service, "lost")
    await service.open(opening(name, ("suffix",), (1, 2), tenant))
    sessions = service._sessions
    await until(lambda: sessions[name].generation is not None)
    await service.step(report(name, answer, (1, 2)))
    service.close(CloseSession(session_id=name))
    await until(lambda: outcomes(service, "kept") + outcomes(service, "lost") > known)


async def drafted(service: DrafterService, name: str, tenant: str, text: tuple[int, ...]) -> tuple[int, ...]:
    """What is drafted after a text of a tenant, once all that others have answered is known."""
    await service.open(opening(f"{name} before", ("suffix",), (1, 2), tenant))
    shared = service.shared
    assert shared is not None
    await until(lambda: not shared._calls)
    draft = await service.open(opening(name, ("suffix",), text, tenant))
    await until(lambda: not shared._calls)
    assert isinstance(draft, Draft)
    return draft.tree.tokens


async def test_both_links_keep_and_recall(url: str) -> None:
    seen = []
    async with store(url, "links") as kept, over_grpc(kept) as linked:
        links: tuple[AnswerStore, ...] = (kept, linked)
        for number, link in enumerate(links):
            tenant = f"tenant {number}"
            first = await link.recall(tenant, "", "a")
            assert (first.answers, first.last, first.more) == ((), "", False)
            assert await link.keep(tenant, first.generation, "a", ANSWER)
            assert await link.keep(tenant, first.generation, "b", [5, 6])
            assert not await link.keep(tenant, first.generation + 1, "b", [7])
            for_b, for_c = await link.recall(tenant, "", "b"), await link.recall(tenant, "", "c")
            assert (for_b.answers, for_c.answers) == ((ANSWER,), (ANSWER, (5, 6)))
            assert for_b.last == for_c.last and for_b.generation == first.generation
            assert await link.keep(tenant, first.generation, "a", [8, 9])
            assert (await link.recall(tenant, for_c.last, "c")).answers == ((8, 9),)
            with refuses(InvalidArgument, field="after"):
                await link.recall(tenant, "yesterday", "c")
            await link.forget(tenant)
            again = await link.recall(tenant, for_c.last, "c")
            assert not again.answers and again.generation != first.generation
            assert not await link.keep(tenant, first.generation, "a", ANSWER)
            seen.append(for_c.answers)
        with refuses(InvalidArgument, field="answer.tokens"):
            await linked.keep("t", 1, "a", [1 << 31])
        with refuses(InvalidArgument, field="drafter"):
            await linked.recall("t", "", "a" * 65)
    assert seen[0] == seen[1]


async def test_the_oldest_answers_are_deleted(url: str) -> None:
    async with store(url, "bounded", max_tokens=10) as kept:
        generation = (await kept.recall("t", "", "a")).generation
        for number in range(30):
            await kept.keep("t", generation, "a", [number] * 4)
        assert (await kept.recall("t", "", "b")).answers == ((28,) * 4, (29,) * 4)
        await kept.keep("t", generation, "a", range(25))
        assert (await kept.recall("t", "", "b")).answers == (tuple(range(15, 25)),)
    async with store(url, "aged", kept_s=0.3) as kept:
        generation = (await kept.recall("t", "", "a")).generation
        await kept.keep("t", generation, "a", ANSWER)
        await asyncio.sleep(0.35)
        found: set[tuple[int, ...]] = set()
        async with asyncio.timeout(PATIENCE_S):
            # On a busy machine, what was kept just now may be too old as well.
            while not found:
                assert await kept.keep("t", generation, "a", [3])
                found = set((await kept.recall("t", "", "b")).answers)
        assert found == {(3,)}


async def test_more_than_one_message_holds(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RECALLED", 10)
    async with store(url, "long") as kept:
        generation = (await kept.recall("t", "", "a")).generation
        for number in range(7):
            await kept.keep("t", generation, "a", [number] * 4)
        found, after, more = [], "", True
        while more:
            some = await kept.recall("t", after, "b")
            found += [answer[0] for answer in some.answers]
            after, more = some.last, some.more
            assert sum(map(len, some.answers)) <= 10
    assert found == list(range(7))


@pytest.mark.parametrize("linked", [False, True])
async def test_what_one_drafter_saw_answered_another_drafts(url: str, linked: bool) -> None:
    async with store(url, f"two drafters {linked}".replace(" ", "")) as kept, over_grpc(kept) as link:
        one, other = (drafter(link if linked else kept) for _ in range(2))
        assert await drafted(other, "x", "me", (1, *ANSWER[:2])) == ()
        await answered(one, "a", "me")
        assert await drafted(other, "y", "me", (1, *ANSWER[:2])) == ANSWER[2:]
        assert (outcomes(one, "kept"), outcomes(other, "recalled")) == (1, 1)
        # Never what another tenant was answered.
        assert await drafted(other, "z", "somebody else", (1, *ANSWER[:2])) == ()
        await asyncio.gather(one.stop(), other.stop())


async def test_nothing_is_left_of_a_forgotten_tenant(url: str) -> None:
    async with store(url, "forgetting") as kept:
        one, other = drafter(kept), drafter(kept)
        for name in ("me", "somebody else"):
            await answered(one, f"of {name}", name)
            assert await drafted(other, f"for {name}", name, (1, *ANSWER[:2])) == ANSWER[2:]
        # Its answer has begun, and ends after that.
        await one.open(opening("under way", ("suffix",), (1, 2), "me"))
        await until(lambda: one._sessions["under way"].generation is not None)
        running = one._sessions["under way"]
        running.answer = list(ANSWER)
        await other.forget(ForgetTenant(tenant="me"))
        one.shared.end(running)  # type: ignore[union-attr]
        await until(lambda: outcomes(one, "lost") == 1)
        await one.forget(ForgetTenant(tenant="me"))
        for service in (one, other):
            assert await drafted(service, "afterwards", "me", (1, *ANSWER[:2])) == ()
        assert await drafted(other, "of others", "somebody else", (1, *ANSWER[:2])) == ANSWER[2:]
        await other.forget(ForgetTenant(tenant="somebody else"))
        assert MARKER not in everything(url, "forgetting")
        await asyncio.gather(one.stop(), other.stop())


def everything(url: str, name: str) -> bytes:
    """All that Redis holds under a name, its keys included."""
    with closing(redis.Redis.from_url(url)) as client:
        found = b""
        for key in client.scan_iter(f"outrider:{{{name}}}:*"):
            kind: Any = client.type(key)
            value: Any = client.xrange(key) if kind == b"stream" else client.get(key)
            found += key + b"".join(b"".join(fields.values()) for _, fields in value) if kind == b"stream" else value
        return found


async def test_answers_are_read_only_by_whom_they_are_for(url: str) -> None:
    # So long a name is in no bytes by chance.
    secret, mine = "a secret of the service", "the tenant of these answers"
    async with (
        store(url, "sealed", secret=secret) as kept,
        store(url, "sealed", secret="another secret") as stranger,
        store(url, "sealed", secret=secret, tokenizer="another") as elsewhere,
        store(url, "sealed") as clear,
    ):
        generation = (await kept.recall(mine, "", "a")).generation
        await kept.keep(mine, generation, "a", ANSWER)
        held = everything(url, "sealed")
        assert held and MARKER not in held and mine.encode() not in held
        for other in (stranger, elsewhere, clear):
            assert not (await other.recall(mine, "", "b")).answers
        assert not (await kept.recall("you", "", "b")).answers
        assert (await kept.recall(mine, "", "b")).answers == (ANSWER,)


@pytest.mark.parametrize("secret", [None, "a secret of the service"])
async def test_altered_answers_are_left_out(url: str, secret: str | None) -> None:
    name = f"altered-{secret is None}"
    async with store(url, name, secret=secret) as kept:
        for tenant in ("me", "you"):
            generation = (await kept.recall(tenant, "", "a")).generation
            await kept.keep(tenant, generation, "a", ANSWER)
        mine, yours = kept._keys("me").answers, kept._keys("you").answers
        with closing(redis.Redis.from_url(url)) as client:
            written: Any = client.xrange(yours)
            fields = dict(written[0][1])
            for sealed in (b"", b"\0", b"\1" + bytes(40), fields[b"tokens"][:-1], fields[b"tokens"]):
                # The last one is another tenant's.
                client.xadd(mine, {**fields, b"tokens": sealed})
            client.xadd(mine, {"nonsense": "1"})
            client.xadd(mine, {**fields, b"total": b"-5", b"size": b"many"})
        assert (await kept.recall("me", "", "b")).answers == (ANSWER,)
        assert kept.damaged == 7
        assert await kept.keep("me", (await kept.recall("me", "", "a")).generation, "a", [4])


async def test_without_redis_drafts_go_on_and_forgetting_says_so(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://:secret@127.0.0.1:{port}"
    options = ("--port", str(port), "--requirepass", "secret")
    async with store(url, "away") as kept:
        service = drafter(kept)
        assert (await drafted(service, "a", "me", (1, 2, 3, 1, 2)))[:3] == (3, 1, 2)
        with pytest.raises(Unavailable):
            await service.forget(ForgetTenant(tenant="me"))
        with started(tmp_path, url, *options):
            await answered(service, "b", "me")
            await service.forget(ForgetTenant(tenant="me"))
        await service.open(opening("c", ("suffix",), (1, 2), "me"))
        service.close(CloseSession(session_id="c"))
        # Full: an answer is lost, and nothing else happens.
        with started(tmp_path, url, *options, "--maxmemory", "1"):
            await drafted(service, "d", "me", (1, 2))
            await service.step(report("d", ANSWER, (1, 2)))
            service.close(CloseSession(session_id="d"))
        assert (outcomes(service, "kept"), outcomes(service, "lost")) == (1, 1)
        await service.stop()


async def test_an_unknown_option_of_the_url_is_named(url: str) -> None:
    async with store(f"{url}?nonsense=1", "option") as kept:
        with refuses(ConfigurationError, says="nonsense"):
            await kept.recall("me", "", "a")


async def test_a_retrieval_service_without_a_store_says_so() -> None:
    async with over_grpc(None) as link, asyncio.timeout(PATIENCE_S):
        with pytest.raises(OutriderError):
            await link.recall("me", "", "a")


async def test_the_rules_of_redis_let_a_keeper_change_no_index(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://:secret@127.0.0.1:{port}"
    with (
        started(tmp_path, url, "--port", str(port), "--requirepass", "secret"),
        closing(redis.Redis.from_url(url)) as admin,
    ):
        allowed = (*rules(READER, "mine").split(), keeper_rules("mine"))
        admin.execute_command("ACL", "SETUSER", "reader", "on", ">p", *allowed)  # type: ignore[no-untyped-call]
        own = f"redis://reader:p@127.0.0.1:{port}"
        async with store(own, "mine") as kept, store(own, "others") as elsewhere:
            generation = (await kept.recall("me", "", "a")).generation
            assert await kept.keep("me", generation, "a", ANSWER)
            assert (await kept.recall("me", "", "b")).answers == (ANSWER,)
            await kept.forget("me")
            with pytest.raises(Unavailable):
                await elsewhere.recall("me", "", "a")
        with closing(redis.Redis.from_url(own)) as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.set("outrider:{mine}:live", "another version")


def answers_config(settings: Settings) -> AnswersConfig:
    found = filled(AnswersConfig, settings.retrieval)
    found.check(settings.retrieval.redis_url, filled(SuffixConfig, settings.drafter).max_cached_tokens)
    return found


def test_settings() -> None:
    tokens, memory = "retrieval.answers_tokens=1000", "drafter.suffix_cached_tokens=1000"
    redis_url = "retrieval.redis_url=redis://127.0.0.1:1"
    environ = {"OUTRIDER_RETRIEVAL__ANSWERS_KEY": "a secret of the service"}
    assert answers_config(load(None, [tokens, memory, redis_url], environ)).key == "a secret of the service"
    assert not answers_config(load(None, [], {})).max_tokens
    for flags, environ_of, field in (
        ([tokens, memory], {}, "retrieval.answers_tokens"),
        ([tokens, redis_url], {}, "retrieval.answers_tokens"),
        ([redis_url, memory], environ, "retrieval.answers_key"),
    ):
        with refuses(ConfigurationError, field=field):
            answers_config(load(None, flags, environ_of))
    with refuses(ConfigurationError, field="--set"):
        load(None, ["retrieval.answers_key=a secret of the service"], {})
