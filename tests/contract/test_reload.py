"""Weights replaced while serving: every answer is plain decoding's of the version that it names."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from speculation.errors import ConfigurationError, Unavailable
from speculation.messages import GenerationRequest
from speculation.reloads import ReloadOrder, RunningAnswers
from tests.running.patience import until
from tests.servers.service import pipeline
from tests.tiny_models.mixture import make_mixture
from tests.tiny_models.new_weights import other_weights
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.weight_versions import (
    ASKED,
    COUNT,
    LINKS,
    TEXT,
    Asked,
    Between,
    Versions,
    answered,
    as_halves,
    serving,
    wanted,
)

_SLOW = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("link", "running"),
    [
        ("in process", "finish"),
        ("over gRPC", "restart"),
        pytest.param("in process", "restart", marks=_SLOW),
        pytest.param("over gRPC", "finish", marks=_SLOW),
    ],
)
async def test_every_answer_is_that_of_the_version_that_it_names(
    versions: Versions, link: str, running: RunningAnswers
) -> None:
    asked = Asked(whole=lambda number: number % 2 == 0)
    between = lambda _, verifier: Between(verifier, asked.before, asked.after)  # noqa: E731
    async with serving(versions, link, between=between) as router:
        asked.router = router
        await router.reload(str(versions.folder / "b"), running, 60.0)
        assert (await router.models())[0].arithmetic == versions.names["b"]
        await asked.check(versions)
        streamed, whole = [asked.answers[number] for number in (1, 3)], [asked.answers[number] for number in (0, 2)]
        # Of which something was told already.
        assert {told.arithmetic for told in streamed} == {versions.names["a"]}
        # Of which nothing was told; one that drafts well may have ended before, and not all do.
        assert all(told.restarted == (told.arithmetic == versions.names["b"]) for told in whole)
        assert any(told.restarted for told in whole) == (running == "restart")
        for task in asked.late:
            versions.check(0, await task, "b")
        for number in range(len(ASKED)):
            versions.check(number, await answered(router, wanted(number)), "b")


@pytest.mark.exhaustive
@pytest.mark.parametrize("running", ["finish", "restart"])
@pytest.mark.parametrize("link", LINKS)
async def test_many_reloads_under_load(versions: Versions, link: str, running: RunningAnswers) -> None:
    async with serving(versions, link, link) as router:
        ended, named = False, list[str]()

        async def user(first: int) -> None:
            count = 0
            while not ended:
                number = (first + count) % COUNT
                answer = await answered(router, wanted(number, whole=(first + count) % 2 == 0))
                versions.check(number, answer)
                named.append(answer.arithmetic)
                count += 1

        users = [asyncio.create_task(user(number)) for number in range(12)]
        for version in "bab":
            await router.reload(str(versions.folder / version), running, 60.0)
            assert (await router.models())[0].arithmetic == versions.names[version]
            before = len(named)
            await until(lambda before=before: len(named) > before + len(users))
        ended = True
        await asyncio.gather(*users)
        # Streamed answers end with the weights that they have begun with.
        assert set(named) == set(versions.names.values())


async def test_the_prefix_cache_is_void(versions: Versions) -> None:
    request = replace(wanted(1), input=TEXT * 4)
    async with serving(versions, "in process") as router:
        await answered(router, request)
        assert (await answered(router, request)).cached > 0
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        again = await answered(router, request)
        assert again.cached == 0
        assert again.tokens == (await answered(router, replace(request, cache_salt="nobody's"))).tokens


@pytest.mark.exhaustive
async def test_two_verifiers_serve_the_new_weights(versions: Versions) -> None:
    async with serving(versions, "in process", "over gRPC") as router:
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        assert {card.arithmetic for card in (await router.service_state()).verifiers} == {versions.names["b"]}
        for number in range(6):
            versions.check(number, await answered(router, wanted(number)), "b")


async def test_one_reload_at_a_time(versions: Versions) -> None:
    async with serving(versions, "in process") as router:
        first = asyncio.create_task(router.reload(str(versions.folder / "b"), "finish", 60.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="being replaced already"):
            await router.reload(str(versions.folder / "b"), "finish", 60.0)
        await first


async def test_an_answer_that_another_verifier_began_with_other_weights_is_not_gone_on_with(versions: Versions) -> None:
    asked: list[GenerationRequest] = []

    class Noting(Between):
        @override
        def generate(self, request: GenerationRequest) -> Any:
            asked.append(request)
            return super().generate(request)

    async with serving(versions, "in process", between=lambda _, verifier: Noting(verifier)) as router:
        begun = await answered(router, wanted(0))
        await router.reload(str(versions.folder / "b"), "finish", 60.0)
        await answered(router, wanted(0))
        moved = replace(asked[0], committed=tuple(begun.tokens[:4]), arithmetic=begun.arithmetic)
        with pytest.raises(Unavailable, match="other weights"):
            await anext(router._verifier.generate(moved))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("dense", ("verifier.kernels=onednn",)),
        ("dense", ("verifier.kernels=torch",)),
        ("dense", ("verifier.dtype=int8",)),
        ("dense", ("verifier.dtype=bfloat16",)),
        ("tied", ()),
        ("halves", ("verifier.weights=as_stored",)),
        ("halves", ("verifier.weights=float32",)),
        ("mixture", ()),
        ("mixture", ("verifier.kernels=onednn",)),
    ],
)
async def test_weights_of_every_form_are_replaced(
    tiny_model: Path, tmp_path: Path, form: str, flags: tuple[str, ...]
) -> None:
    first = tmp_path / "a"
    if form == "mixture":
        make_mixture(tiny_model, first)
    elif form == "tied":
        make_tiny_model(first, tie_word_embeddings=True)
    else:
        shutil.copytree(tiny_model, first)
    other_weights(first, tmp_path / "b")
    if form == "halves":
        as_halves(first)
        as_halves(tmp_path / "b")
    asked = wanted(1, tokens=40)
    async with pipeline(tmp_path / "b", *flags) as running:
        new = await answered(running.router, asked)
    async with pipeline(first, f"verifier.weights_from=['{tmp_path}']", *flags) as running:
        old = await answered(running.router, asked)
        assert old.tokens != new.tokens
        for folder, expected in ((tmp_path / "b", new), (first, old), (tmp_path / "b", new)):
            await running.router.reload(str(folder), "finish", 60.0)
            again = await answered(running.router, replace(asked, strategy="autoregressive"))
            assert (again.tokens, again.arithmetic) == (expected.tokens, expected.arithmetic)


async def test_the_card_says_how_the_new_weights_are_stored(versions: Versions, tmp_path: Path) -> None:
    halves = tmp_path / "halves"
    shutil.copytree(versions.folder / "b", halves)
    as_halves(halves)
    flags = ("verifier.weights=float32", f"verifier.weights_from=['{tmp_path}']")
    async with pipeline(versions.folder / "a", *flags) as running:
        before = (await running.router.models())[0].weights
        assert (before.stored, before.multiplied) == ("float32", ("float32",))
        await running.router.reload(str(halves), "finish", 60.0)
        assert (await running.router.models())[0].weights == replace(before, stored="bfloat16")


@pytest.mark.exhaustive
async def test_a_verifier_takes_the_weights_of_another_one(versions: Versions) -> None:
    flag = f"verifier.weights_from=['{versions.folder}']"
    async with pipeline(versions.folder / "a", flag) as first, pipeline(versions.folder / "a", flag) as second:
        assert await first.verifier.replaced_weights() == ("", "")
        order = ReloadOrder(reload_id="r", step="read", folder=str(versions.folder / "b"), within_s=10.0)
        await first.verifier.reload(order)
        asked = asyncio.create_task(first.verifier.replaced_weights())
        for step in ("pause", "replace", "keep"):
            await asyncio.sleep(0.01)
            assert not asked.done()
            await first.verifier.reload(replace(order, step=step))
        folder, digest = await asked
        assert folder == str((versions.folder / "b").resolve())
        with pytest.raises(ConfigurationError, match="are not those that the other verifiers have read"):
            await second.verifier.take_weights(folder, "another")
        versions.check(0, await answered(second.router, wanted(0)), "a")
        await second.verifier.take_weights(folder, digest)
        versions.check(0, await answered(second.router, wanted(0)), "b")
