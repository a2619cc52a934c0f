"""Decoding paused and resumed: by the router over both links, and by HTTP and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest

import outrider
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.router.config import RouterWaits
from services.router.service import RouterService
from speculation.errors import Unavailable
from speculation.ports import VerifierPort
from speculation.reloads import PauseMode
from tests.running.patience import at_rest, until
from tests.servers.http_service import HttpService, http_served
from tests.servers.service import pipeline
from tests.tiny_models.weight_versions import COUNT, Answered, Between, Versions, answered, serving, wanted

KEYS = {"admin": "a" * 20, "user": "u" * 20}
QUIET_S = 0.15
OFTEN = RouterWaits(joining_s=0.01)


class Places:
    """Of a router's verifiers; others can take them."""

    def __init__(self) -> None:
        self.there: list[Between] = []

    def __call__(self, _: int, verifier: VerifierPort) -> Between:
        self.there.append(Between(verifier))
        return self.there[-1]


async def test_kept_answers_stop_between_two_tokens_and_go_on(versions: Versions) -> None:
    async with serving(versions, "in process", "over gRPC") as router:
        told = [Answered() for _ in range(4)]
        tasks = [asyncio.create_task(answered(router, wanted(n), each)) for n, each in enumerate(told)]
        await until(lambda: all(each.tokens for each in told))
        await router.pause("keep", 1.0)
        assert await router.paused()
        late = asyncio.create_task(answered(router, wanted(4)))
        # What the last passes gave may still be on its way.
        await at_rest(lambda: [len(each.tokens) for each in told])
        assert not late.done() and not all(task.done() for task in tasks)
        # No answer is written by two versions.
        with pytest.raises(Unavailable, match="resume first"):
            await router.reload(str(versions.folder / "b"), "finish", 5.0)
        assert await router.paused()
        await router.resume()
        assert not await router.paused()
        for number, task in enumerate([*tasks, late]):
            versions.check(number, await task, "a")


async def test_answers_end_and_new_ones_wait_for_other_weights(versions: Versions) -> None:
    async with serving(versions, "in process", "over gRPC") as router:
        early = asyncio.create_task(answered(router, wanted(0)))
        told = Answered()
        streamed = asyncio.create_task(answered(router, wanted(1), told))
        await until(lambda: bool(told.tokens))
        await router.pause("wait", 60.0)
        versions.check(0, await early, "a")
        versions.check(1, await streamed, "a")
        late = asyncio.create_task(answered(router, wanted(2)))
        await router.reload(str(versions.folder / "b"), "finish", 5.0)
        assert await router.paused() and not late.done()
        await router.resume()
        versions.check(2, await late, "b")


async def test_answers_that_were_kept_end_where_a_second_pause_waits_for_them(versions: Versions) -> None:
    async with serving(versions, "in process") as router:
        told = Answered()
        kept = asyncio.create_task(answered(router, wanted(0), told))
        await until(lambda: told.tokens)
        await router.pause("keep", 1.0)
        late = asyncio.create_task(answered(router, wanted(1)))
        await asyncio.sleep(0)
        await router.pause("wait", 60.0)
        versions.check(0, await kept, "a")
        assert await router.paused() and not late.done()
        await router.resume()
        versions.check(1, await late, "a")


async def test_what_cannot_be_paused_everywhere_goes_on_everywhere(versions: Versions) -> None:
    async def refuse(step: str) -> None:
        if step == "hold":
            raise Unavailable("not now")

    between = lambda number, verifier: Between(verifier, refuse) if number else verifier  # noqa: E731
    async with serving(versions, "in process", "in process", between=between) as router:
        with pytest.raises(Unavailable, match="not now"):
            await router.pause("keep", 1.0)
        assert not await router.paused()
        versions.check(0, await answered(router, wanted(0)), "a")


async def test_a_verifier_that_comes_meanwhile_stands_still(versions: Versions) -> None:
    places = Places()
    async with (
        serving(versions, "in process", "over gRPC", between=places, waits=OFTEN) as router,
        pipeline(versions.folder / "a") as second,
        pipeline(versions.folder / "a") as third,
    ):
        await router.pause("wait", 60.0)
        places.there[1].verifier = second.verifier
        await until(lambda: second.verifier.loop.hold.on)
        assert await router.paused()
        late = [asyncio.create_task(answered(router, wanted(number))) for number in range(COUNT)]
        await until(lambda: second.verifier.loop.waiting)
        await asyncio.sleep(QUIET_S)
        assert not any(task.done() for task in late)
        # Another router resumes; the first one may find who comes then before it knows of it.
        await RouterService(router._config, router._verifier).resume()
        places.there[1].verifier = third.verifier
        await asyncio.sleep(QUIET_S)
        await until(lambda: not third.verifier.loop.hold.on)
        for number, task in enumerate(late):
            versions.check(number, await task, "a")


@pytest.mark.examples(2)
@pytest.mark.parametrize("mode", get_args(PauseMode))
async def test_a_verifier_that_comes_after_the_router_has_gone_stands_still(versions: Versions, mode: PauseMode) -> None:
    places = Places()
    async with (
        serving(versions, "in process", "over gRPC", between=places, waits=OFTEN) as router,
        pipeline(versions.folder / "a") as late,
    ):
        other = RouterService(router._config, router._verifier)
        await router.pause(mode, 60.0)
        assert await other.ready()
        await told_by_none(router)
        for each in places.there:
            each.verifier = late.verifier
        await until(lambda: late.verifier.loop.hold.on)
        assert (await late.verifier.describe()).paused == mode
        # Nor does it begin again of itself once somebody has resumed.
        await RouterService(router._config, router._verifier).resume()
        await until(lambda: other._pauses._joining is None or other._pauses._joining.done())
        assert await other.ready()
        await asyncio.sleep(QUIET_S)
        assert not late.verifier.loop.hold.on
        versions.check(0, await answered(other, wanted(0)), "a")


async def test_who_joins_a_pause_that_has_ended_goes_on(versions: Versions) -> None:
    """All verifiers die between the end of a pause and the moment when the router that began it would have heard of that."""
    places, waits = Places(), RouterWaits(joining_s=0.3)
    async with (
        serving(versions, "in process", "over gRPC", between=places, waits=waits) as router,
        pipeline(versions.folder / "a") as late,
    ):
        other = RouterService(router._config, router._verifier)
        await router.pause("keep", 1.0)
        assert await other.ready()
        await other.resume()
        for each in places.there:
            each.verifier = late.verifier
        await until(lambda: late.verifier.loop.hold.on)
        assert await other.ready()
        await until(lambda: not late.verifier.loop.hold.on)
        await until(lambda: router._pauses._joining is not None and router._pauses._joining.done())
        # A pause that begins afterwards is another one.
        await router.pause("keep", 1.0)
        assert await other.ready()
        await asyncio.sleep(QUIET_S)
        assert late.verifier.loop.hold.on
        await other.resume()
        versions.check(0, await answered(router, wanted(0)), "a")


async def told_by_none(router: RouterService) -> None:
    """What becomes of a router's orders when it dies."""
    joining = router._pauses._joining
    assert joining is not None
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_answers_that_do_not_end_in_time_go_on(versions: Versions) -> None:
    async with serving(versions, "in process") as router:
        told = Answered()
        task = asyncio.create_task(answered(router, wanted(0), told))
        await until(lambda: bool(told.tokens))
        with pytest.raises(Unavailable, match="under way still"):
            await router.pause("wait", 0.001)
        assert not await router.paused()
        # Nor does one that nobody waits for any more hold it up; and a pause ends whoever resumes.
        waiting = asyncio.create_task(router.pause("wait", 60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not await router.paused()
        versions.check(0, await task, "a")


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    records = [f"{{hash: {hash_key(KEYS['admin'])}, id: admin, tenant: t, scopes: [generate, admin]}}"]
    records.append(f"{{hash: {hash_key(KEYS['user'])}, id: user, tenant: t}}")
    keys.write_text("".join(f"- {record}\n" for record in records))
    with http_served(tiny_model, config=HttpConfig(port=0, public=PublicServerConfig(keys_file=keys))) as running:
        yield running


def call(service: HttpService, path: str, key: str = "admin", method: str = "POST", **given: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {KEYS[key]}", **given.pop("headers", {})}
    return httpx2.request(method, service.url + path, headers=headers, timeout=60, **given)


@pytest.mark.parametrize(
    ("pause", "given", "resume"),
    [
        ("/pause?mode=keep&clear_cache=false", {}, "/resume"),
        ("/pause?within_s=5&clear_cache=True", {}, "/resume"),
        ("/pause", {"json": {"mode": "keep"}}, "/resume"),
        ("/pause", {}, "/resume"),
        ("/pause_generation", {"json": {"mode": "in_place"}}, "/continue_generation"),
    ],
)
def test_by_the_names_of_other_servers(service: HttpService, pause: str, given: dict[str, Any], resume: str) -> None:
    for path, fields, state in ((pause, given, True), (resume, {}, False)):
        answer = call(service, path, **fields)
        assert (answer.status_code, answer.json()) == (200, {"status": "paused" if state else "resumed"})
        assert call(service, "/is_paused", method="GET").json() == {"is_paused": state}


def test_by_the_sdk(service: HttpService) -> None:
    with outrider.Client(service.grpc) as client:
        client.pause(mode="keep")
        assert call(service, "/is_paused", method="GET").json() == {"is_paused": True}
        # It is no reason to restart a process, nor to send requests elsewhere.
        assert [call(service, path, method="GET").status_code for path in ("/health", "/ready")] == [200, 200]
        client.resume()
        assert client.generate("fox", max_tokens=2).token_ids
        for given, field in (({"mode": "abort"}, "mode"), ({"within_s": 0.0}, "within_s")):
            with pytest.raises(outrider.InvalidArgument) as caught:
                client.pause(**given)  # type: ignore[arg-type]
            assert caught.value.field == field


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/pause?mode=abort", {}, "mode"),
        ("/pause", {"json": {"mode": "abort"}}, "mode"),
        ("/pause?mode=keep", {"json": {"mode": "keep"}}, "mode"),
        ("/pause", {"json": {"within_s": 0}}, "within_s"),
        ("/pause?wait_for_inflight_requests=false", {}, "wait_for_inflight_requests"),
        ("/pause?clear_cache=" + 9000 * "[", {}, "clear_cache"),
        ("/pause?within_s=nan", {}, "within_s"),
        ("/pause_generation", {"json": {"mode": "abort"}}, "mode"),
        ("/resume", {"json": {"mode": "keep"}}, "mode"),
    ],
)
def test_what_is_not_done_is_refused_by_name(service: HttpService, path: str, given: dict[str, Any], param: str) -> None:
    answer = call(service, path, **given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert call(service, "/is_paused", method="GET").json() == {"is_paused": False}


def test_a_key_needs_the_scope_and_a_page_needs_more_than_a_click(service: HttpService) -> None:
    for path in ("/pause", "/resume", "/pause_generation", "/continue_generation"):
        assert call(service, path, key="user").status_code == 403
        # A page in a browser may send that to any server without asking it.
        assert call(service, path, headers={"origin": "http://elsewhere.example"}).status_code in (403, 415)
    assert call(service, "/is_paused", key="user", method="GET").status_code == 403
