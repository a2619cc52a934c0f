"""Cells of the chaos matrix in one process: a verifier dies in mid-answer, and another one goes on behind the same router.

With LoRA adapters, of which another one is loaded and unloaded meanwhile, and with layers that have a state. Every answer has
the tokens of plain decoding. A change that not all verifiers take is taken back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cluster.settings import component_configs
from cluster.settings.config import load
from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from services.links.grpc_verifier import GrpcVerifierLink
from services.router.service import RouterService
from speculation.errors import OutriderError
from tests.chaos.in_processes import tiny
from tests.chaos.test_other_weights import TOKEN, Served, verifier
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.hybrids import make_hybrid
from tests.running.patience import until
from tests.servers.service import tiny_settings
from tests.tiny_models.lora import make_adapter

USERS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "greedy": ("blend", {}),
    "sampled": ("blend", {"temperature": 0.9, "top_p": 0.9}),
    "plain": ("autoregressive", {"temperature": 1.0}),
}
TOKENS_WANTED, AFTER = 160, 40


async def answer(router: RouterService, user: str, shown: list[int], model: str = "tiny", strategy: str = "") -> None:
    """Add a user's answer to what was shown, as it comes."""
    usual, sampling = USERS[user]
    asked = ClientRequest(
        input=tuple([40 + len(user), 41, 42, 43] * 6),
        sampling=RequestedSampling(max_tokens=TOKENS_WANTED, ignore_eos=True, seed=4, **sampling),  # type: ignore[arg-type]
        model=model,
        strategy=strategy or usual,
        tenant="",
    )
    async for event in router.generate(asked):
        if isinstance(event, TextChunk):
            shown += event.token_ids


Shown = dict[tuple[str, str], list[int]]


def nothing(models: Sequence[str]) -> Shown:
    """What every user has seen at first of each model's answer."""
    return {(user, model): [] for user in USERS for model in models}


async def plain(router: RouterService, models: Sequence[str]) -> Shown:
    """What every user must see."""
    found = nothing(models)
    for (user, model), shown in found.items():
        await answer(router, user, shown, model, "autoregressive")
    assert len({tuple(each) for each in found.values()}) == len(found)
    return found


async def broken_off(router: RouterService, both: tuple[Served, Served], models: Sequence[str]) -> tuple[Shown, Served]:
    """What users have seen in the end, and the verifier that died under them."""
    seen = nothing(models)
    users = [asyncio.create_task(answer(router, user, shown, model)) for (user, model), shown in seen.items()]
    await until(lambda: all(len(shown) >= AFTER for shown in seen.values()))
    victim = max(both, key=lambda served: served.verifier.loop.running)
    assert victim.verifier.loop.running
    await victim.die()
    await asyncio.gather(*users)
    return seen, victim


@asynccontextmanager
async def two_verifiers(model: Path, *flags: str) -> AsyncIterator[tuple[RouterService, tuple[Served, Served]]]:
    """Both of one model, behind one router."""
    settings = load(flags=tiny_settings(*flags), environ={})
    async with verifier(model, *flags) as one, verifier(model, *flags) as other:
        links = [GrpcVerifierLink(f"127.0.0.1:{each.port}", TOKEN) for each in (one, other)]
        yield RouterService(component_configs.router_config(settings, tiny(model)), ChosenVerifier(links)), (one, other)
        for link in links:
            await link.close()


class Changes:
    """Loads and unloads an adapter until it is cancelled, and asks for an answer with it whenever it is there."""

    def __init__(self, router: RouterService, folder: Path, expected: list[int]) -> None:
        self.router, self.folder, self.expected = router, folder, expected
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            for step in (self._load, self._answer, self._unload):
                with suppress(OutriderError):
                    await step()
                    self.done[step.__name__] += 1
                await asyncio.sleep(0)

    async def _load(self) -> None:
        await self.router.load_adapter("passing", str(self.folder))

    async def _answer(self) -> None:
        shown: list[int] = []
        await answer(self.router, "greedy", shown, "passing")
        assert shown == self.expected

    async def _unload(self) -> None:
        await self.router.unload_adapter("passing")


@pytest.mark.exhaustive
@needs_kernels
async def test_answers_with_adapters_while_others_come_and_go(tiny_model: Path, tmp_path: Path) -> None:
    kept, passing = (make_adapter(tmp_path / f"{seed}", tiny_model, seed=seed) for seed in (1, 2))
    flags = (f"verifier.lora_folders=[{tmp_path}]", f"verifier.lora_modules={{kept: {kept}}}")
    async with two_verifiers(tiny_model, *flags) as (router, both):
        expected = await plain(router, ("tiny", "kept"))
        await router.load_adapter("passing", str(passing))
        other: list[int] = []
        await answer(router, "greedy", other, "passing", "autoregressive")
        changes = Changes(router, passing, other)
        changing = asyncio.create_task(changes.run())
        seen, victim = await broken_off(router, both, ("tiny", "kept"))
        assert seen == expected
        # What has died comes back, and takes part in changes again.
        await victim.return_()
        before = changes.done.copy()
        await until(lambda: changing.done() or len(changes.done - before) == 3)
        changing.cancel()
        with suppress(asyncio.CancelledError):
            await changing
        with suppress(OutriderError):
            await router.unload_adapter("passing")
        for served in both:
            assert [*(await served.verifier.describe()).adapters] == ["kept"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
async def test_answers_of_layers_with_a_state(kind: str, tmp_path: Path) -> None:
    async with two_verifiers(make_hybrid(kind, tmp_path / "model")) as (router, both):
        expected = await plain(router, ("tiny",))
        assert (await broken_off(router, both, ("tiny",)))[0] == expected
