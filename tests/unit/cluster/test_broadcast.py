"""Telling every replica of a deployment: who is counted, and what is said of those that did not answer. Without Ray."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.ray import serve_link
from cluster.ray.serve_link import ServeVerifierLink, tell_all
from cluster.ray.shared_weights import go_on_asking, take_weights_of_others
from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError, InvalidArgument, NotBegun, NotFound, OutriderError, Unavailable
from speculation.reloads import ReloadOrder

Answers = list[BaseException | None] | Exception


class Told:
    """The answers of a broadcast."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[BaseException | None]:
        assert return_exceptions
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


class Handle:
    """A deployment's handle: so many replicas, of which some answer."""

    app_name = "outrider"

    def __init__(self, name: str, replicas: int, answers: Answers, log: list[str]) -> None:
        self.deployment_name = name
        self.replicas = replicas
        self._answers = answers
        self._log = log

    def broadcast(self, method: str, *arguments: object) -> Told:
        self._log.append(f"{self.deployment_name}.{method}{arguments}")
        return Told(self._answers)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count(handle: Handle) -> int:
        return handle.replicas

    monkeypatch.setattr(serve_link, "_count", count)


@pytest.mark.parametrize(
    ("replicas", "answers", "said"),
    [
        (2, [None, None], None),
        # One that started meanwhile.
        (1, [None, None], None),
        (3, [None, Unavailable("the drafter did not answer"), None], "1 of 3 drafter replicas did not answer"),
        # Serve leaves out, without a word, whom it cannot reach.
        (3, [None], "2 of 3 drafter replicas did not answer"),
        (2, DeploymentUnavailableError("d"), "2 of 2 drafter replicas did not answer"),
        (0, RayError(), "1 of 1 drafter replicas did not answer"),
        (2, TimeoutError(), "not all of 2 drafter replicas answered within 10 s"),
    ],
)
async def test_who_did_not_answer(replicas: int, answers: Answers, said: str | None) -> None:
    log: list[str] = []
    assert await tell_all(Handle("drafter", replicas, answers, log), "forget", "one") == said  # type: ignore[arg-type]
    assert log == ["drafter.forget('one',)"]


async def test_the_drafters_are_told_after_the_verifiers_whatever_becomes_of_those() -> None:
    log: list[str] = []
    verifiers = Handle("verifier", 2, [None, RuntimeError("planted")], log)
    drafters = Handle("drafter", 3, [None, None, None], log)
    link = ServeVerifierLink(verifiers, drafters)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match=r"^1 of 2 verifier replicas"):
        await link.forget("one")
    assert log == ["verifier.forget('one',)", "drafter.forget('one',)"]
    well = ServeVerifierLink(Handle("verifier", 1, [None], log), drafters)  # type: ignore[arg-type]
    await well.forget("one")


ORDER = ReloadOrder(reload_id="r", step="read", folder="/b")


@pytest.mark.parametrize(
    ("replicas", "answers", "error", "says"),
    [
        (3, ["a" * 64, "b" * 64, "a" * 64], ConfigurationError, "the same weights"),
        (2, ["a" * 64, InvalidArgument("folder", "/b", "another")], InvalidArgument, "folder"),
        (2, ["a" * 64, RayError()], Unavailable, "gone"),
        # Whom Serve does not reach, and one that has come meanwhile and knows of no reload.
        (2, ["a" * 64], Unavailable, "1 of 2 verifiers"),
        (0, [], Unavailable, "no verifier"),
        (2, TimeoutError(), Unavailable, "within 3600 s"),
        (2, DeploymentUnavailableError("d"), Unavailable, "no verifier runs"),
    ],
)
async def test_a_step_of_a_reload_is_taken_by_all(
    replicas: int, answers: Any, error: type[OutriderError], says: str
) -> None:
    link = ServeVerifierLink(Handle("verifier", replicas, answers, []), None)  # type: ignore[arg-type]
    with pytest.raises(error, match=says):
        await link.reload(ORDER)


async def test_a_step_that_all_have_taken_gives_their_digest() -> None:
    log: list[str] = []
    answers: Any = ["a" * 64] * 3
    link = ServeVerifierLink(Handle("verifier", 3, answers, log), None)  # type: ignore[arg-type]
    assert await link.reload(ORDER) == "a" * 64
    assert [each.partition("(")[0] for each in log] == ["verifier.reload"]


@pytest.mark.parametrize(
    ("running", "answers", "taken"),
    [
        # The first one of a service asks nobody.
        (0, RuntimeError("nobody is there"), []),
        (2, [("", ""), ("", "")], []),
        (2, [("/b", "d"), ("/b", "d")], [("/b", "d")]),
        # One of them has just started, too, and the other one does not answer.
        (3, [("", ""), RayError(), ("/b", "d")], [("/b", "d")]),
    ],
)
async def test_a_new_replica_takes_the_weights_of_the_others(
    running: int, answers: Any, taken: list[tuple[str, str]]
) -> None:
    async def states(application: str) -> dict[str, dict[str, int]]:
        assert application == "outrider"
        return {"verifier": {"starting": 1, "running": running}}

    found: list[tuple[str, str]] = []

    async def take(folder: str, digest: str) -> None:
        found.append((folder, digest))

    here = SimpleNamespace(app_name="outrider", deployment="verifier")
    serve = SimpleNamespace(
        get_replica_context=lambda: here,
        get_deployment_handle=lambda name, app_name: Handle(f"{app_name}.{name}", running, answers, []),
    )
    await take_weights_of_others(take, serve=serve, count=states)
    assert found == taken


async def test_verifiers_that_are_gone_are_not_asked_in_a_flood() -> None:
    """One of them hangs, so that the router goes on asking; the others fail at once."""
    asked = 0

    async def remote() -> bytes:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        raise RayError

    link = ServeVerifierLink(SimpleNamespace(describe=SimpleNamespace(remote=remote)), None)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2 * serve_link._ASK_ANOTHER_S):
            await link.describe()
    assert 1 < asked < 12


@pytest.mark.parametrize(("own", "taken"), [(("", ""), [("/b", "d")]), (("/a", "c"), [])])
async def test_one_with_the_first_weights_goes_on_asking(own: tuple[str, str], taken: list[tuple[str, str]]) -> None:
    """The router may have died before it told this one to keep the new weights, or the others ended while it started."""
    found: list[tuple[str, str]] = []
    said: list[Any] = [[RayError()], [own, ("/b", "d")], [own, ("/b", "d")]]

    async def states(application: str) -> dict[str, dict[str, int]]:
        return {"verifier": {"running": 2}}

    async def served() -> tuple[str, str]:
        return (found or [own])[-1]

    async def take(folder: str, digest: str) -> None:
        found.append((folder, digest))

    serve = SimpleNamespace(
        get_replica_context=lambda: SimpleNamespace(app_name="outrider", deployment="verifier"),
        get_deployment_handle=lambda name, app_name: Handle(name, 2, said.pop(0), []),
    )
    ask_others = partial(take_weights_of_others, take, serve=serve, count=states)
    going = asyncio.create_task(go_on_asking(served, ask_others, every_s=0.0))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not going.done() and found == taken
    going.cancel()


async def test_a_new_replica_does_not_serve_other_weights_because_nobody_answers() -> None:
    async def states(application: str) -> dict[str, dict[str, int]]:
        return {"verifier": {"running": 2}}

    async def take(folder: str, digest: str) -> None:
        raise AssertionError

    for answers in (TimeoutError(), DeploymentUnavailableError("d"), [RayError(), RayError()]):
        serve = SimpleNamespace(
            get_replica_context=lambda: SimpleNamespace(app_name="outrider", deployment="verifier"),
            get_deployment_handle=lambda name, app_name, answers=answers: Handle(name, 2, answers, []),
        )
        with pytest.raises(Unavailable, match="do not say"):
            await take_weights_of_others(take, serve=serve, count=states)


@pytest.mark.parametrize(
    ("replicas", "answers", "error"),
    [
        (2, ["d", "d"], None),
        (2, ["d", "other"], ConfigurationError),
        (2, ["d", NotFound("lora_name", "one", "two")], NotFound),
        # Serve leaves out, without a word, whom it cannot reach.
        (2, ["d"], Unavailable),
        (0, [], Unavailable),
        (2, DeploymentUnavailableError("d"), NotBegun),
        (2, TimeoutError(), Unavailable),
    ],
)
async def test_all_verifiers_load_an_adapter(replicas: int, answers: Any, error: type[Exception] | None) -> None:
    log: list[str] = []
    link = ServeVerifierLink(Handle("verifier", replicas, answers, log), None)  # type: ignore[arg-type]
    order = AdapterOrder(order_id="o", step="load", name="one", folder="/adapters/one")
    if error is None:
        assert await link.adapt(order) == "d"
    else:
        with pytest.raises(error):
            await link.adapt(order)
    assert len(log) == 1 and log[0].startswith("verifier.adapt(b'")
