"""Weights replaced while serving by verifiers whose target is split over stages and ranks: as by one of one process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from speculation.reloads import RunningAnswers
from tests.contract import test_reload, test_reloads_refused
from tests.engine.layouts import LAYOUTS, laid_out
from tests.engine.stage_forks import forked_stages, services_fork
from tests.kernels.kernels_here import needs_kernels
from tests.tiny_models.weight_versions import Versions, answered, serving, wanted

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("reload over ranks"),
]
_SLOW = pytest.mark.exhaustive


@pytest.fixture(
    params=["2 ranks", pytest.param("4 ranks", marks=_SLOW), pytest.param("2 stages of 2 ranks", marks=_SLOW)], autouse=True
)
def layout(request: pytest.FixtureRequest) -> Iterator[str]:
    with laid_out(LAYOUTS[request.param]):
        yield request.param


@pytest.mark.exhaustive
@pytest.mark.parametrize("running", ["finish", "restart"])
async def test_every_answer_is_that_of_the_version_that_it_names(versions: Versions, running: RunningAnswers) -> None:
    await test_reload.test_every_answer_is_that_of_the_version_that_it_names(versions, "in process", running)


@pytest.mark.exhaustive
async def test_many_reloads_under_load(versions: Versions) -> None:
    await test_reload.test_many_reloads_under_load(versions, "over gRPC", "finish")


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ["read", "pause", "replace"])
async def test_verifiers_change_together_or_not_at_all(versions: Versions, step: str) -> None:
    await test_reloads_refused.test_verifiers_change_together_or_not_at_all(versions, step, takes_it=True)


@pytest.mark.examples(3)
@pytest.mark.parametrize("damage", ["half of it has arrived", "another shape", "not a number"])
async def test_a_version_that_does_not_fit_is_refused(versions: Versions, damage: str) -> None:
    await test_reloads_refused.test_a_version_that_does_not_fit_is_refused(versions, damage)


@pytest.mark.exhaustive
async def test_a_rank_that_dies_under_load_comes_back_with_the_new_weights(
    versions: Versions, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    services_fork(monkeypatch)
    spread = LAYOUTS[layout]
    flags = (f"verifier.tensor_parallel_size={spread.ranks}", f"verifier.stages={spread.stages}")
    async with serving(versions, "in process", flags=flags) as router:
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        asked = [asyncio.create_task(answered(router, wanted(number))) for number in range(4)]
        await asyncio.sleep(0.1)
        os.kill(forked_stages()[-1].pid, signal.SIGKILL)
        for number, task in enumerate(asked):
            versions.check(number, await task, "b")
        assert (await router.models())[0].arithmetic == versions.names["b"]
