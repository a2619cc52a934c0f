"""Telling every replica of a deployment: who is counted, and what is said of those that did not answer. Without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.ray import serve_link
from cluster.ray.serve_link import ServeVerifierLink, tell_all
from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError, NotBegun, NotFound, Unavailable

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


@pytest.mark.parametrize(
    ("replicas", "answers", "error"),
    [
        (2, ["d", "d"], None),
        (2, ["d", "other"], ConfigurationError),
        (2, ["d", NotFound("lora_name", "one", "two")], NotFound),
        # Serve leaves out, without a word, whom it cannot reach.
        (2, ["d"], Unavailable),
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
