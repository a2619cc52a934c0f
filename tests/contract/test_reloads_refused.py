"""Weights that are not replaced: refused, or undone at all verifiers, and no answer is another one for it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.model_files.folder import weights_digest
from services.router.config import RouterWaits
from services.router.service import RouterService
from services.verifier.changing import reloading
from services.verifier.config import TargetConfig
from services.verifier.loading.replaceable import check_supported
from services.verifier.model import new_weights
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, Unavailable
from speculation.ports import VerifierPort
from speculation.reloads import ReloadOrder
from tests.running.patience import until
from tests.running.refusals import refuses
from tests.servers.service import pipeline
from tests.tiny_models.new_weights import DAMAGES, FILE, other_weights
from tests.tiny_models.weight_versions import (
    Answered,
    Asked,
    Between,
    Versions,
    answered,
    as_halves,
    serving,
    wanted,
)

_SLOW = pytest.mark.exhaustive


async def refused(router: RouterService, versions: Versions, folder: str, error: type[OutriderError], **given: Any) -> None:
    """The reload is refused while an answer is under way, and neither it nor the next one is another."""
    told = Answered()
    task = asyncio.create_task(answered(router, wanted(2), told))
    await until(lambda: len(told.tokens) > 4)
    with refuses(error, **given):
        await router.reload(folder, "restart", 60.0)
    versions.check(2, await task, "a")
    versions.check(0, await answered(router, wanted(0, tokens=20)), "a", tokens=20)


@pytest.mark.examples(3)
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_version_that_does_not_fit_is_refused(versions: Versions, damage: str) -> None:
    folder = versions.folder / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    other_weights(versions.folder / "a", folder)
    DAMAGES[damage](folder)
    error = InvalidArgument if damage == "a file that lies elsewhere" else ConfigurationError
    async with serving(versions, "in process") as router:
        await refused(router, versions, str(folder), error)


async def test_a_folder_elsewhere_is_refused(versions: Versions, tiny_model: Path) -> None:
    async with serving(versions, "in process") as router:
        for folder in (str(tiny_model), str(versions.folder / "a" / ".." / ".." / "x"), "a", str(versions.folder / "none")):
            await refused(router, versions, folder, InvalidArgument, field="folder", value=folder)


async def test_without_allowed_folders_nothing_is_replaced(versions: Versions) -> None:
    async with pipeline(versions.folder / "a") as running:
        with refuses(ConfigurationError, "verifier.weights_from"):
            await running.router.reload(str(versions.folder / "b"), "finish", 60.0)


async def test_files_that_change_while_they_are_read_are_refused(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = versions.folder / "written"
    other_weights(versions.folder / "a", folder)
    digest = weights_digest

    def rewritten(of: Path) -> str:
        found = digest(of)
        (folder / FILE).touch()
        return found

    monkeypatch.setattr(new_weights, "weights_digest", rewritten)
    async with serving(versions, "in process") as router:
        await refused(router, versions, str(folder), ConfigurationError, says="changed")


async def test_without_memory_for_a_second_copy_nothing_is_loaded(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_weights, "free_memory", lambda: 1000.0)
    monkeypatch.delattr(new_weights, "load_beside")
    async with serving(versions, "in process") as router:
        await refused(router, versions, str(versions.folder / "b"), ConfigurationError, says="no room")


@pytest.mark.exhaustive
async def test_answers_that_do_not_end_in_time_go_on_with_the_old_weights(versions: Versions) -> None:
    asked = Asked(whole=lambda number: False)
    async with serving(versions, "in process", between=lambda _, verifier: Between(verifier, asked.before)) as router:
        asked.router = router
        with pytest.raises(Unavailable, match="under way still after"):
            await router.reload(str(versions.folder / "b"), "finish", 0.001)
        await asked.check(versions, "a")


@pytest.mark.parametrize(
    ("step", "takes_it"),
    [
        ("pause", False),
        ("replace", True),
        *(
            pytest.param(*each, marks=_SLOW)
            for each in (("read", False), ("read", True), ("pause", True), ("replace", False))
        ),
    ],
)
async def test_verifiers_change_together_or_not_at_all(versions: Versions, step: str, takes_it: bool) -> None:
    async def fail(now: str) -> None:
        if now == step:
            raise Unavailable("gone")

    def between(number: int, verifier: VerifierPort) -> Any:
        if number == 0:
            return verifier
        return Between(verifier, after=fail) if takes_it else Between(verifier, before=fail)

    async with serving(versions, "in process", "over gRPC", between=between) as router:
        with pytest.raises(Unavailable, match="gone"):
            await router.reload(str(versions.folder / "b"), "finish", 60.0)
        for card in (await router.service_state()).verifiers:
            assert card.arithmetic == versions.names["a"]
        for number in range(6):
            versions.check(number, await answered(router, wanted(number)), "a")


@pytest.mark.examples(2)
@pytest.mark.parametrize("lost", [1, 9])
async def test_new_weights_that_are_not_confirmed_are_told_again(versions: Versions, lost: int) -> None:
    times = iter(range(lost))

    async def lose(step: str) -> None:
        if step == "keep" and next(times, None) is not None:
            raise Unavailable("lost on the way")

    between = lambda number, verifier: Between(verifier, after=lose) if number else verifier  # noqa: E731
    waits = RouterWaits(keeping_s=0.01)
    async with serving(versions, "in process", "in process", between=between, waits=waits) as router:
        if lost == 1:
            await router.reload(str(versions.folder / "b"), "finish", 60.0)
        else:
            with pytest.raises(Unavailable, match="the new weights serve, but not at all verifiers: lost on the way"):
                await router.reload(str(versions.folder / "b"), "finish", 60.0)
        for number in range(4):
            versions.check(number, await answered(router, wanted(number)), "b")


async def test_a_verifier_waits_for_slower_ones_as_long_as_the_router_lives(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "_SILENT_S", 0.5)

    async def reads_for_long(step: str) -> None:
        if step == "read":
            await asyncio.sleep(1.0)

    between = lambda number, verifier: Between(verifier, reads_for_long) if number else verifier  # noqa: E731
    waits = RouterWaits(beat_s=0.05)
    async with serving(versions, "over gRPC", "in process", between=between, waits=waits) as router:
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        for number in range(4):
            versions.check(number, await answered(router, wanted(number)), "b")


async def test_a_reload_whose_next_step_does_not_come_is_undone(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pipeline(versions.folder / "a", f"verifier.weights_from=['{versions.folder}']") as running:
        order = ReloadOrder(reload_id="lost", step="read", folder=str(versions.folder / "b"), within_s=10.0)
        await running.verifier.reload(order)
        await running.verifier.reload(replace(order, step="pause"))
        monkeypatch.setattr(reloading, "_SILENT_S", 0.1)
        await running.verifier.reload(replace(order, step="replace"))
        waiting = asyncio.create_task(answered(running.router, wanted(0)))
        versions.check(0, await waiting, "a")
        with pytest.raises(Unavailable, match="no such reload"):
            await running.verifier.reload(replace(order, step="keep"))


@pytest.mark.exhaustive
async def test_a_held_type_that_differs_is_refused(versions: Versions, tmp_path: Path) -> None:
    """A served model that keeps bfloat16 as it is stored takes no float32, but for one that holds float32 both are fine."""
    for version in ("a", "b"):
        shutil.copytree(versions.folder / version, tmp_path / version)
    as_halves(tmp_path / "a")
    allowed = f"verifier.weights_from=['{tmp_path}']"
    async with pipeline(tmp_path / "a", allowed, "verifier.weights=as_stored") as running:
        with refuses(ConfigurationError):
            await running.router.reload(str(tmp_path / "b"), "finish", 60.0)
    async with pipeline(tmp_path / "b", allowed, "verifier.weights=float32") as running:
        await running.router.reload(str(tmp_path / "a"), "finish", 60.0)
        got = await answered(running.router, wanted(0))
    async with pipeline(tmp_path / "a", "verifier.weights=float32") as running:
        assert got.tokens == (await answered(running.router, wanted(0))).tokens


def test_what_is_not_replaced_so_far_is_refused_by_name() -> None:
    with refuses(ConfigurationError, field="verifier.device", value="cuda:0"):
        check_supported(TargetConfig(model_path="/model", device="cuda:0"))
