"""What routers learn, shared through Redis: sums of several, tenants forgotten everywhere, damage, and a Redis that is away."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import redis

from services.metrics.prometheus_sink import PrometheusSink, written
from services.router.learning.compared_cost import ComparedCost
from services.router.learning.config import LearningConfig
from services.router.learning.contexts import Context, context_of
from services.router.learning.counts import Counts
from services.router.learning.counts_in_redis import COMMANDS, CountsInRedis
from services.router.learning.learning import Learning
from services.router.learning.shared_counts import GIVEN_UP_S, SharedCounts
from services.router.strategies import StrategyConfig
from speculation.errors import ConfigurationError, Unavailable
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers import redis_servers
from tests.unit.router.test_learning import NEW, Replaying, answer
from tests.unit.router.test_rules import FACTS, REQUEST

pytestmark = pytest.mark.xdist_group("learning_in_redis")
ACME = Context("acme's", "512.0.greedy")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URL of the server's default user, and of one who may do no more than routers need."""
    with redis_servers.with_user(tmp_path_factory.mktemp("embedded"), "routers", "outrider:learning:*", COMMANDS) as urls:
        yield urls


class Router:
    """The counts of one router, and what it shares."""

    def __init__(self, url: str, scope: str = "tiny") -> None:
        self.now, self.sink = 0.0, PrometheusSink()
        self.counts, self.store = Counts(), CountsInRedis(url, scope)
        self.shared = SharedCounts(self.counts, self.store, threading.Lock(), self.sink, lambda: self.now)

    def learn(self, context: Context = ACME, own: float = 50.0) -> None:
        costs = {"suffix": (own, 100.0)}
        self.counts.learn(context, costs)
        self.shared.asked(context)
        self.shared.learn(context, costs)

    async def exchange(self, context: Context = ACME) -> ComparedCost | None:
        """Exchange, as after a request in a context; what is known of it then."""
        self.shared.asked(context)
        await self.shared.exchange()
        return self.counts.of(context.tenant).get(context.kind, {}).get("suffix")

    def counted(self) -> str:
        return written(self.sink.collect()).decode()


@asynccontextmanager
async def routers(url: str, number: int = 2) -> AsyncIterator[list[Router]]:
    made = [Router(url) for _ in range(number)]
    try:
        yield made
    finally:
        for router in made:
            await router.shared.close()


async def test_what_several_routers_see_is_added_up(servers: dict[str, str], admin: redis.Redis) -> None:
    async with routers(servers["own"], 3) as (one, two, three):
        for _ in range(3):
            one.learn()
        two.learn(own=90.0)
        await one.exchange()
        both = await two.exchange()
        assert both is not None and (both.part, both.whole) == pytest.approx((240.0, 400.0))
        # Nothing is added twice, and a new router has it all.
        for router in (one, two, three, one):
            again = await router.exchange()
            assert again is not None and again.numbers == pytest.approx(both.numbers)
        assert three.counts.everybody["any"]["suffix"].whole == pytest.approx(400.0)
        assert three.counts.estimate(ACME, "suffix") == one.counts.estimate(ACME, "suffix")
        # Another model's are apart.
        other = Router(servers["own"], "another")
        assert await other.exchange() is None and other.counts.everybody == {}
        await other.shared.close()
    keys = list(admin.scan_iter())
    assert keys and all(b"acme" not in key and b"acme" not in (admin.get(key) or b"") for key in keys)
    assert all(admin.pttl(key) > 0 for key in keys)


async def test_a_tenant_is_forgotten_by_all(servers: dict[str, str], admin: redis.Redis) -> None:
    other_tenant = replace(ACME, tenant="other")
    async with routers(servers["own"]) as (one, two):
        for router in (one, two):
            router.learn()
            router.learn(other_tenant)
            await router.exchange()
        await one.shared.forget(ACME.tenant)
        # It has learnt more since, and would bring the tenant back.
        two.learn()
        assert await two.exchange() is None and await one.exchange() is None
        assert two.counts.of("other") and two.counts.everybody
        assert len([key for key in admin.scan_iter() if b":of:" in key]) == 2
        two.learn()
        found = await two.exchange()
        assert found is not None and found.whole == 100.0
        # Who has not asked for long is not kept in memory: it may have been forgotten.
        two.now += GIVEN_UP_S + 1
        await two.exchange(other_tenant)
        assert not two.counts.of(ACME.tenant) and two.counts.of("other")


async def test_all_that_an_exchange_did_not_come_to_is_told_later(
    servers: dict[str, str], admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = [replace(ACME, tenant=name) for name in ("one", "two", "three")]
    async with routers(servers["own"]) as (one, other):
        for context in contexts:
            one.learn(context)

        async def away(*_: object, **__: object) -> None:
            raise Unavailable("planted")

        with monkeypatch.context() as patch:
            patch.setattr(one.store, "add", away)
            await one.shared.exchange()
        await one.shared.exchange()
        told = [await other.exchange(context) for context in contexts]
        assert [found and found.whole for found in told] == [100.0] * 3


def damaged(value: bytes, key: bytes, other: bytes) -> dict[str, bytes]:
    body = json.dumps({"512.0.greedy": {"suffix": [1, 2, 3, 4, -5]}}).encode()
    huge = body.replace(b"-5", b"1" * 400)
    return {
        "cut": value[:-1],
        "altered": value.replace(b"1", b"2"),
        "of another key": other,
        "empty": b"",
        "no json": hashlib.sha256(key + b"\0{").digest() + b"{",
        "no sums": hashlib.sha256(key + b"\0" + body).digest() + body,
        "no finite number": hashlib.sha256(key + b"\0" + huge).digest() + huge,
        "no mapping": hashlib.sha256(key + b"\0[]").digest() + b"[]",
        "deep": hashlib.sha256(key + b"\0" + b"[" * 9000).digest() + b"[" * 9000,
    }


@pytest.mark.parametrize("how", list(damaged(b"", b"", b"")))
async def test_damage_is_left_out_and_written_anew(
    servers: dict[str, str], admin: redis.Redis, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with routers(servers["own"]) as (one, two):
        one.learn()
        await one.exchange()
        (key,) = (key for key in admin.scan_iter() if b":of:" in key)
        (other,) = (admin.get(each) or b"" for each in admin.scan_iter() if each != key)
        admin.set(key, damaged(admin.get(key) or b"", key, other)[how])
        two.learn(own=80.0)
        with caplog.at_level(logging.WARNING):
            found = await two.exchange()
        assert found is not None and (found.part, found.whole) == (80.0, 100.0) and two.store.damaged == 1
        assert caplog.text.count("is damaged in Redis") == 1
        assert "outrider_router_learning_damaged_total 1.0" in two.counted()
        one.learn()
        found = await one.exchange()
        assert found is not None and (found.part, found.whole) == (130.0, 200.0) and not one.store.damaged


async def test_a_key_of_another_kind_costs_no_request(servers: dict[str, str], admin: redis.Redis) -> None:
    async with routers(servers["own"], 1) as (one,):
        one.learn()
        await one.exchange()
        for key in list(admin.scan_iter()):
            admin.delete(key)
            admin.lpush(key, b"x")
        one.learn()
        found = await one.exchange()
        assert found is not None and found.whole == 200.0
        assert 'outcome="failed"} 1.0' in one.counted()


async def test_while_redis_is_away_a_router_learns_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with routers(f"redis://:secret@127.0.0.1:{free_port()}", 1) as (one,):
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                one.learn()
                found = await one.exchange()
        assert found is not None and found.whole == 300.0
        # It is said once; where Redis is, is nobody's business.
        assert caplog.text.count("this one goes on alone") == 1 and "secret" not in caplog.text
        assert 'router_learning_exchanges_total{outcome="failed"} 3.0' in one.counted()
        with pytest.raises(Unavailable):
            await one.shared.forget(ACME.tenant)
        assert not one.counts.of(ACME.tenant)


async def test_what_was_learnt_alone_is_added_later(
    servers: dict[str, str], admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with routers(servers["own"]) as (one, two):
        admin.execute_command("ACL", "SETUSER", "routers", "-set")
        try:
            for router in (one, two):
                for _ in range(3):
                    router.learn()
                    found = await router.exchange()
                    assert found is not None
                assert found.whole == 300.0
        finally:
            admin.execute_command("ACL", "SETUSER", "routers", "+set")
        with caplog.at_level(logging.INFO):
            await one.exchange()
            found = await two.exchange()
        assert found is not None and found.whole == pytest.approx(600.0)
        assert caplog.text.count("is shared again") == 2
        assert two.counts.everybody["any"]["suffix"].whole == pytest.approx(600.0)


async def test_one_router_chooses_by_what_another_has_learnt(servers: dict[str, str], admin: redis.Redis) -> None:
    config = LearningConfig(on=True, alone=False, redis_url=servers["own"])
    verifier = Replaying({"auto": 0.9, "suffix": 0.5})
    one, two = (Learning(config, StrategyConfig(), verifier) for _ in range(2))  # type: ignore[arg-type]
    try:
        while await answer(one) == "auto":
            pass
        assert one._shared is not None and two._shared is not None
        await one._shared.exchange()
        assert context_of(NEW, FACTS).tenant in one.counts._tenants
        first = two.choose(REQUEST, FACTS, NEW)
        await two._shared.exchange()
        second = two.choose(REQUEST, FACTS, NEW)
        assert first is not None and second is not None
        assert (first.choice.strategy, second.choice.strategy) == ("auto", "suffix")
        await two.forget("acme")
        one.choose(REQUEST, FACTS, NEW)
        await one._shared.exchange()
        assert not one.counts.of("acme") and not two.counts.of("acme")
    finally:
        await one.stop()
        await two.stop()


def test_a_wrong_url_is_refused() -> None:
    with refuses(ConfigurationError, field="router.learning_redis_url", value="hidden"):
        CountsInRedis("http://:secret@here", "tiny")
