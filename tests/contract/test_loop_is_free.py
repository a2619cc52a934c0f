"""Whatever a service is at, its event loop takes its next step soon: /health and all other answers wait for nothing longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from services.api.messages import RequestedSampling
from services.router.service import RouterService
from services.verifier.model.target import TransformersTarget
from speculation.errors import TargetLost
from speculation.types import StructuredOutputs
from tests.running.loop_watch import watched
from tests.running.patience import until
from tests.tiny_models.new_weights import other_weights
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.weight_versions import Versions, answered, serving, wanted

pytestmark = [pytest.mark.xdist_group("loop is free")]
# What held everybody up took more; steps take a hundredth of it. One try in so many is not disturbed by other work.
HELD_S, TRIES = 0.25, 4
CONTEXT = 8192
FLAGS = (f"verifier.max_model_len={CONTEXT}", f"verifier.kv_cache_tokens={4 * CONTEXT}")
Job = Callable[[RouterService, Versions], Awaitable[object]]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Two versions of weights that take a moment to read, to exchange and to give back."""
    folder = tmp_path_factory.mktemp("wide")
    make_tiny_model(
        folder / "a", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, max_position_embeddings=CONTEXT
    )
    other_weights(folder / "a", folder / "b")
    return Versions(folder=folder, plain={}, names={})


async def reload(router: RouterService, wide: Versions) -> None:
    """There and back, beside answers of which some begin again."""
    for version, running in (("b", "restart"), ("a", "finish")):
        asked = [asyncio.create_task(answered(router, wanted(number, whole=number % 2 == 0))) for number in range(4)]
        await router.reload(str(wide.folder / version), running, 60.0)  # type: ignore[arg-type]
        await asyncio.gather(*asked)


async def rebuild(router: RouterService, wide: Versions) -> None:
    """The target is lost in mid-answer; all answers go on."""
    finish, lost = TransformersTarget.end_pass, list[bool]()

    def losing(self: TransformersTarget) -> object:
        if not lost:
            lost.append(True)
            raise TargetLost("planted loss")
        return finish(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersTarget, "end_pass", losing)
        await asyncio.gather(*(answered(router, wanted(number)) for number in range(4)))
    assert lost


async def long_prompt(router: RouterService, wide: Versions) -> None:
    ids = tuple(7 + (number * number) % 300 for number in range(CONTEXT - 300))
    await answered(router, replace(wanted(0), input=ids))


async def long_answer(router: RouterService, wide: Versions) -> None:
    """Compared with other strategies, which is done once it is there."""
    asked = wanted(0, tokens=1500)
    await answered(router, replace(asked, compare=("autoregressive", "prompt_lookup", "suffix", "recycling")))


async def big_grammar(router: RouterService, wide: Versions) -> None:
    fields = ", ".join(f'"k{n}": {{"type": "string", "pattern": "a{{{n}}}"}}' for n in range(300))
    form = StructuredOutputs(kind="json", text=f'{{"type": "object", "properties": {{{fields}}}}}')
    sampling = RequestedSampling(max_tokens=40, structured_outputs=form)
    await answered(router, replace(wanted(0), sampling=sampling))


async def pauses(router: RouterService, wide: Versions) -> None:
    asked = [asyncio.create_task(answered(router, wanted(number))) for number in range(4)]
    await until(lambda: router._open == len(asked))
    for mode in ("keep", "wait"):
        await router.pause(mode, 60.0)  # type: ignore[arg-type]
        await router.resume()
    await asyncio.gather(*asked)


async def crowd(router: RouterService, wide: Versions) -> None:
    await asyncio.gather(*(answered(router, wanted(number, tokens=20)) for number in range(60)))


JOBS: tuple[Job, ...] = (reload, rebuild, long_prompt, long_answer, big_grammar, pauses, crowd)


async def together(router: RouterService, wide: Versions) -> None:
    """Most of them at once."""
    await asyncio.gather(*(job(router, wide) for job in (reload, long_prompt, long_answer, big_grammar, crowd)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", [*JOBS, together], ids=lambda job: job.__name__)
async def test_others_have_their_turn(wide: Versions, job: Job) -> None:
    tries = list[float]()
    for _ in range(TRIES):
        # A new one each time: what a service does once is part of every try.
        async with serving(wide, "in process", flags=FLAGS) as router, watched() as watch:
            await job(router, wide)
        tries.append(watch.longest_s)
        if watch.longest_s < HELD_S:
            return
    pytest.fail(f"the loop was held for {', '.join(f'{each:.2f} s' for each in tries)}")


async def test_what_holds_the_loop_is_seen() -> None:
    for work in (lambda: time.sleep(2 * HELD_S), lambda: sum(range(30_000_000))):
        async with watched() as watch:
            work()
        assert watch.longest_s > HELD_S
