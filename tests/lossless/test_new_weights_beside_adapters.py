"""Weights are replaced beside adapters: these add to the new ones what they added to the old ones, in one process and over ranks
and stages, and answers say by which arithmetic they were chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.verifier.service import VerifierService
from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError, NotBegun, Unavailable
from speculation.messages import GenerationRequest, Progress
from speculation.reloads import ReloadOrder
from tests.engine.fakes import PLAIN
from tests.engine.layouts import Layout
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_lora_is_lossless import DRAFTED, PROMPTS, SAMPLING, asked, said, verifier
from tests.lossless.test_ranks_in_services import over
from tests.running.patience import PATIENCE_S
from tests.running.refusals import refuses
from tests.tiny_models.lora import WEIGHTS, WITH_ENDS, make_adapter
from tests.tiny_models.new_weights import FILE, other_weights
from tests.tiny_models.tiny import make_tiny_model

pytestmark = needs_kernels

NAMES = ("", "one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a model, `a` and `b`, and adapters."""
    folder = tmp_path_factory.mktemp("versions")
    first = make_tiny_model(folder / "a")
    other_weights(first, folder / "b")
    make_adapter(folder / "one", first, seed=1, targets=WITH_ENDS)
    make_adapter(folder / "two", first, seed=2, rank=3, targets=("q_proj", "up_proj"))
    return folder


@asynccontextmanager
async def serving(
    folder: Path, version: str = "a", layout: Layout | None = None, adapters_from: Path | None = None
) -> AsyncIterator[VerifierService]:
    adapters = {name: str(folder / name) for name in NAMES if name}
    allowed = () if adapters_from is None else (adapters_from,)
    async with verifier(
        folder / version, adapters, weights_from=(folder,), lora_folders=allowed, **asdict(layout or Layout())
    ) as running:
        yield running


def order(folder: Path, **given: object) -> ReloadOrder:
    return replace(ReloadOrder(reload_id="r", step="read", folder=str(folder), within_s=PATIENCE_S), **given)  # type: ignore[arg-type]


async def reload(serving: VerifierService, folder: Path, **given: object) -> None:
    for step in ("read", "pause", "replace", "keep"):
        await serving.reload(order(folder, step=step, **given))


async def plain(running: VerifierService) -> list[list[int]]:
    return [await said(running, asked(name, PROMPTS[1], PLAIN, **sampling)) for name in NAMES for sampling in SAMPLING]


@over
async def test_answers_are_those_of_a_server_of_the_new_weights(folder: Path, layout: Layout) -> None:
    async with serving(folder, "b") as other:
        wanted, named = await plain(other), (await other.describe()).adapters
    async with serving(folder, layout=layout) as running:
        assert await plain(running) != wanted
        await reload(running, folder / "b")
        assert await plain(running) == wanted
        assert (await running.describe()).adapters == named
        drafted = [asked(name, PROMPTS[1], DRAFTED, **sampling) for name in NAMES for sampling in SAMPLING]
        numbered = [replace(each, request_id=f"{number}") for number, each in enumerate(drafted)]
        assert await asyncio.gather(*(said(running, each) for each in numbered)) == wanted


async def told(running: VerifierService, wanted: GenerationRequest, seen: asyncio.Event) -> tuple[list[int], str]:
    """The tokens that count of an answer, and the arithmetic that it says."""
    tokens: list[int] = []
    arithmetic = ""
    async for event in running.generate(wanted):
        if isinstance(event, Progress):
            tokens = [*([] if event.restarted else tokens), *event.token_ids]
            arithmetic = event.arithmetic or arithmetic
            seen.set()
    return tokens, arithmetic


async def test_one_that_begins_again_says_by_what(folder: Path) -> None:
    whole = replace(asked("one", PROMPTS[1], PLAIN), whole=True)
    async with serving(folder, "b") as other:
        wanted = await told(other, whole, asyncio.Event())
    async with serving(folder) as running:
        begun = asyncio.Event()
        answer = asyncio.create_task(told(running, whole, begun))
        await begun.wait()
        await reload(running, folder / "b", running="restart")
        assert await answer == wanted
        # What was begun by the weights before goes on nowhere.
        moved = replace(whole, request_id="moved", committed=tuple(wanted[0][:5]), arithmetic="0123456789abcdef")
        with pytest.raises(NotBegun):
            await said(running, moved)
        assert await said(running, replace(moved, request_id="own", arithmetic=wanted[1])) == wanted[0][5:]


@over
async def test_an_adapter_that_holds_old_weights_is_no_adapter_of_new_ones(
    folder: Path, layout: Layout, tmp_path: Path
) -> None:
    own = "base_model.model.model.embed_tokens.base_layer.weight"
    for version in "ab":
        held = make_adapter(tmp_path / version, folder / "a", seed=3, targets=("embed_tokens",))
        weights = load_file(folder / version / FILE)["model.embed_tokens.weight"]
        save_file({**load_file(held / WEIGHTS), own: weights}, held / WEIGHTS, metadata={"format": "pt"})

    def adapting(step: str, version: str) -> AdapterOrder:
        where = str(tmp_path / version)
        return AdapterOrder(order_id="o", step=step, name=version, folder=where, within_s=PATIENCE_S)  # type: ignore[arg-type]

    async with serving(folder, layout=layout, adapters_from=tmp_path) as running:
        await running.adapt(adapting("load", "a"))
        with refuses(ConfigurationError, says="base_layer"):
            await running.reload(order(folder / "b"))
        for step in ("close", "drop"):
            await running.adapt(adapting(step, "a"))
        await running.reload(order(folder / "b"))
        with pytest.raises(Unavailable, match="being replaced"):
            await running.adapt(adapting("load", "b"))
        for step in ("pause", "replace", "keep"):
            await running.reload(order(folder / "b", step=step))
        with refuses(ConfigurationError, says="base_layer"):
            await running.adapt(adapting("load", "a"))
        await running.adapt(adapting("load", "b"))
        assert "b" in (await running.describe()).adapters
