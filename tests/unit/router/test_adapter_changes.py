"""Adapters are loaded and unloaded at all verifiers of a service together, or at none, and never under an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typing_extensions import override

from cluster.verifiers.chosen_verifier import ChosenVerifier
from services.router.adapter_changes import AdapterChanges
from services.verifier.changing.adapting import Adapting
from services.verifier.engine.identity import Identity, with_adapter
from speculation import limits
from speculation.adapters import AdapterOrder
from speculation.errors import ConfigurationError, InvalidArgument, NotBegun, OutriderError, Unavailable
from speculation.messages import Finished, GenerationRequest, Progress
from speculation.types import FinishReason
from tests.engine.fakes import request
from tests.running.patience import PATIENCE_S, until
from tests.running.refusals import refuses

# Any folder that exists will do, with one in it.
ADAPTERS = Path(__file__).parents[2]
ONE = str(ADAPTERS / "lab")


class Adapters:
    """What ``Adapting`` needs of a target."""

    def __init__(self, digest: str = "d", broken: bool = False) -> None:
        self.adapters: dict[str, str] = {}
        self._digest, self._broken = digest, broken

    def load_adapter(self, name: str, folder: Path) -> str:
        if self._broken:
            raise ConfigurationError("broken")
        self.adapters[name] = self._digest
        return self._digest

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Verifier:
    """The part of a verifier that adapters come and go at."""

    def __init__(self, target: Adapters, folder: Path = ADAPTERS) -> None:
        self.target = target
        self.replacing = False
        self.adapting = Adapting(target, [folder], asyncio.Lock(), lambda: self.replacing)  # type: ignore[arg-type]
        self.adapt = self.adapting.obey

    async def answer(self, adapter: str, until: asyncio.Event, *, committed: tuple[int, ...] = ()) -> list[object]:
        async def events(_: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
            yield Progress(token_ids=(1,))
            await until.wait()
            yield Finished(reason=FinishReason.STOP)

        wanted: GenerationRequest = replace(request("r", [1]), adapter=adapter, committed=committed)
        return [event async for event in self.adapting.answering(wanted, events, "arithmetic")]


def service_of(*targets: Adapters) -> tuple[AdapterChanges, list[Verifier]]:
    verifiers = [Verifier(target) for target in targets]
    return AdapterChanges(ChosenVerifier(verifiers)), verifiers  # type: ignore[arg-type]


async def test_all_have_it_or_none() -> None:
    changes, verifiers = service_of(Adapters(), Adapters())
    await changes.load("one", ONE)
    assert [each.target.adapters for each in verifiers] == [{"one": "d"}] * 2
    await changes.unload("one")
    assert [each.target.adapters for each in verifiers] == [{}, {}]


@pytest.mark.parametrize("other", [Adapters(broken=True), Adapters(digest="other")], ids=["cannot read it", "reads another"])
async def test_where_one_cannot_load_it_no_other_keeps_it(other: Adapters) -> None:
    changes, verifiers = service_of(Adapters(), other)
    with pytest.raises(ConfigurationError):
        await changes.load("one", ONE)
    assert [each.target.adapters for each in verifiers] == [{}, {}]


async def test_what_was_there_before_stays_where_one_cannot_load_it() -> None:
    changes, verifiers = service_of(Adapters(), Adapters(broken=True))
    await verifiers[0].adapt(AdapterOrder(order_id="earlier", step="load", name="one", folder=ONE))
    with pytest.raises(ConfigurationError):
        await changes.load("one", ONE)
    assert [each.target.adapters for each in verifiers] == [{"one": "d"}, {}]


async def test_who_leaves_while_it_is_loaded_leaves_none_behind() -> None:
    begun, go_on, loaded = threading.Event(), threading.Event(), threading.Event()

    class Slow(Adapters):
        @override
        def load_adapter(self, name: str, folder: Path) -> str:
            begun.set()
            assert go_on.wait(PATIENCE_S)
            digest = super().load_adapter(name, folder)
            loaded.set()
            return digest

    changes, verifiers = service_of(Slow(), Adapters())
    loading = asyncio.create_task(changes.load("one", ONE))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    loading.cancel()
    await asyncio.sleep(0.01)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert await asyncio.to_thread(loaded.wait, PATIENCE_S)
    await until(lambda: not verifiers[0].target.adapters)
    assert [each.target.adapters for each in verifiers] == [{}, {}]


@pytest.mark.parametrize("hears", [True, False], ids=["and hears that its caller is gone", "and hears nothing"])
async def test_one_that_is_taken_back_while_a_verifier_elsewhere_reads_it_is_not_kept(*, hears: bool) -> None:
    """Over gRPC, who goes is heard of before the files are read, and the order to take it back comes in a call of its own."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Adapters):
        @override
        def load_adapter(self, name: str, folder: Path) -> str:
            begun.set()
            assert go_on.wait(PATIENCE_S)
            return super().load_adapter(name, folder)

    only = Verifier(Slow())
    first, second = (replace(order_to_load(ONE), order_id=name, name=name) for name in ("first", "second"))
    loading = [asyncio.create_task(only.adapt(order)) for order in (first, second)]
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    if hears:
        loading[0].cancel()
    # One is being read, the other waits for its turn.
    for order in (first, second):
        await only.adapt(replace(order, step="undo"))
    go_on.set()
    ended = await asyncio.gather(*loading, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError) == hears and isinstance(ended[1], Unavailable)
    assert only.target.adapters == {}
    # It counts for that order alone.
    await only.adapt(replace(first, order_id="third"))
    assert only.target.adapters == {"first": "d"}


async def test_where_no_thread_can_be_started_it_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    only = Verifier(Adapters())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Unavailable, match="no thread can be started to read the adapter"):
            await only.adapt(order_to_load(ONE))
    assert only.target.adapters == {}
    assert await only.adapt(order_to_load(ONE)) == "d"


async def test_who_leaves_while_it_is_dropped_leaves_it_nowhere() -> None:
    changes, (first, second) = service_of(Adapters(), Adapters())
    await changes.load("one", ONE)
    dropping, go_on = asyncio.Event(), asyncio.Event()

    async def late(order: AdapterOrder) -> str:
        if order.step == "drop":
            dropping.set()
            await go_on.wait()
        return await second.adapting.obey(order)

    second.adapt = late
    unloading = asyncio.create_task(changes.unload("one"))
    await dropping.wait()
    assert first.target.adapters == {}
    unloading.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await unloading
    assert second.target.adapters == {}


async def test_one_that_is_loaded_again_while_its_answers_are_waited_for_stays() -> None:
    only = Verifier(Adapters())
    await only.adapt(order_to_load(ONE))
    end = asyncio.Event()
    answer = asyncio.create_task(only.answer("one", end))
    await asyncio.sleep(0)
    close = AdapterOrder(order_id="c", step="close", name="one", within_s=0.05)
    closing = asyncio.create_task(only.adapt(close))
    await asyncio.sleep(0)
    await only.adapt(order_to_load(ONE))
    with refuses(InvalidArgument, "lora_name"):
        await closing
    end.set()
    assert len(await answer) == len(await only.answer("one", end)) == 2


async def test_an_answer_under_way_is_waited_for_and_no_other_begins() -> None:
    changes, (first, second) = service_of(Adapters(), Adapters())
    await changes.load("one", ONE)
    end = asyncio.Event()
    answer = asyncio.create_task(first.answer("one", end))
    await asyncio.sleep(0)
    unloading = asyncio.create_task(changes.unload("one"))
    await asyncio.sleep(0.01)
    assert not unloading.done() and "one" in first.target.adapters and "one" in second.target.adapters
    for verifier in (first, second):
        with pytest.raises(NotBegun):
            await verifier.answer("one", end)
    # One that comes from a verifier that was lost goes on.
    moved = asyncio.create_task(second.answer("one", end, committed=(5,)))
    await asyncio.sleep(0)
    end.set()
    await unloading
    assert len(await answer) == len(await moved) == 2
    assert first.target.adapters == second.target.adapters == {}


async def test_one_that_is_used_for_too_long_is_served_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNLOAD_S", 0.02)
    changes, (first, second) = service_of(Adapters(), Adapters())
    await changes.load("one", ONE)
    end = asyncio.Event()
    answer = asyncio.create_task(first.answer("one", end))
    await asyncio.sleep(0)
    with refuses(InvalidArgument, "lora_name"):
        await changes.unload("one")
    end.set()
    assert len(await answer) == 2
    for verifier in (first, second):
        assert len(await verifier.answer("one", end)) == 2


async def test_of_two_that_unload_it_at_once_one_is_refused() -> None:
    changes, (only,) = service_of(Adapters())
    await changes.load("one", ONE)
    end = asyncio.Event()
    answer = asyncio.create_task(only.answer("one", end))
    await asyncio.sleep(0)
    first = asyncio.create_task(changes.unload("one"))
    await asyncio.sleep(0)
    with pytest.raises(OutriderError, match="already"):
        await changes.unload("one")
    end.set()
    await first
    assert len(await answer) == 2 and only.target.adapters == {}


async def test_one_whose_router_was_lost_while_it_unloaded_is_unloaded_by_the_next() -> None:
    changes, (only,) = service_of(Adapters())
    await changes.load("one", ONE)
    await only.adapt(AdapterOrder(order_id="of the lost one", step="close", name="one", within_s=limits.UNLOAD_S))
    with pytest.raises(OutriderError, match="already"):
        await changes.unload("one")
    only.adapting._closed_until["one"] -= 2 * limits.UNLOAD_S
    await changes.unload("one")
    assert only.target.adapters == {}


async def test_one_whose_router_was_lost_while_it_unloaded_serves_again() -> None:
    changes, (only,) = service_of(Adapters())
    await changes.load("one", ONE)
    lost = AdapterOrder(order_id="of the lost one", step="close", name="one", within_s=limits.UNLOAD_S)
    await only.adapt(lost)
    end = asyncio.Event()
    end.set()
    with pytest.raises(NotBegun):
        await only.answer("one", end)
    only.adapting._closed_until["one"] -= 2 * limits.UNLOAD_S
    assert len(await only.answer("one", end)) == 2
    # What it still says comes too late.
    with pytest.raises(Unavailable, match="too late"):
        await only.adapt(replace(lost, step="drop"))
    assert only.target.adapters == {"one": "d"}


async def test_one_that_is_told_twice_to_drop_it_has_done_so() -> None:
    changes, (only,) = service_of(Adapters())
    await changes.load("one", ONE)
    order = AdapterOrder(order_id="o", step="close", name="one", within_s=limits.UNLOAD_S)
    for step in ("close", "drop", "drop"):
        await only.adapt(replace(order, step=step))
    assert only.target.adapters == {}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path an error shows whole."""
    with TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize("folder", ["adapters/one", "/elsewhere", "ROOT/one/../..", "ROOT-of-others/one", "ROOT/none", ""])
async def test_folders_that_nothing_is_read_from(folder: str, short: Path) -> None:
    root = short / "adapters"
    (root / "one").mkdir(parents=True)
    only = Verifier(Adapters(), root)
    with refuses(InvalidArgument, "lora_path", allowed="verifier.lora_folders"):
        await only.adapt(order_to_load(folder.replace("ROOT", str(root))))
    assert only.target.adapters == {}


async def test_a_file_that_lies_elsewhere_is_not_read(short: Path) -> None:
    folder = short / "adapters" / "one"
    folder.mkdir(parents=True)
    (short / "secret").touch()
    (folder / "adapter_config.json").symlink_to(short / "secret")
    only = Verifier(Adapters(), short / "adapters")
    with refuses(InvalidArgument, "lora_path", allowed="adapter_config.json does not"):
        await only.adapt(order_to_load(str(folder)))
    assert only.target.adapters == {}


def order_to_load(folder: str) -> AdapterOrder:
    return AdapterOrder(order_id="x", step="load", name="one", folder=folder)


async def test_an_answer_goes_on_by_no_other_weights_than_it_was_begun_by() -> None:
    verifier = Verifier(Adapters())
    await verifier.adapt(AdapterOrder(order_id="o", step="load", name="one", folder=ONE))

    async def once_replaced(message: GenerationRequest) -> AsyncGenerator[Progress | Finished, None]:
        # Weights were replaced while its grammar was compiled.
        Identity(arithmetic="new").check(message)
        yield Finished(reason=FinishReason.STOP)

    begun = replace(request("r", [1]), adapter="one", committed=(1,), arithmetic=with_adapter("old", "d"))
    with pytest.raises(NotBegun, match="other weights"):
        _ = [event async for event in verifier.adapting.answering(begun, once_replaced, "old")]
