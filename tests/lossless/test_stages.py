"""A target split over processes: the same bits as in one, under every strategy; a stage that dies or disagrees is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch

from cluster.build import Pipeline
from cluster.models.target import resolve
from cluster.ray.stage_actors import launch_child
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from services.router import strategies as known
from services.verifier.choosing.sought import Draw, Sought
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import library
from services.verifier.loading.load_model import split_layers
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.stages import upstream
from services.verifier.stages.activations import Activations
from services.verifier.stages.orders import Op, Orders, read_orders
from services.verifier.stages.process import spec_from_json, spec_to_json
from services.verifier.stages.upstream import StageSpec
from speculation.errors import ConfigurationError, Internal, TargetLost
from tests.engine.stage_forks import forked_stages, launch_fork, services_fork
from tests.lossless.architectures import make
from tests.running.refusals import refuses
from tests.servers.service import pipeline
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.tiny_gguf import ALIKE, Q4_K_M, WIDE, make_tiny_gguf

# One process, for the stages that they share.
pytestmark = pytest.mark.xdist_group("stages")

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


def config(model: Path, stages: int, **options: object) -> TargetConfig:
    return TargetConfig(
        model_path=str(model),
        kv_cache_tokens=2048,
        max_model_len=512,
        threads=1,
        stages=stages,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def whole(model: Path) -> torch.Tensor:
    """What ``passes`` gives in one process."""
    return passes(TransformersTarget(config(model, 1)))


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[TransformersTarget]:
    """Two stages; each test leaves them without a session."""
    target = TransformersTarget(config(model, 2), launch_child)
    yield target
    target.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", [ALIKE, Q4_K_M], ids=["alike", "q4_k_m"])
def test_weights_as_stored_in_stages(kinds: Mapping[str, str], tmp_path: Path) -> None:
    """Every stage keeps its blocks as they are; the last one's output layer shares them with the first one's embeddings."""
    gguf = make_tiny_gguf(tmp_path, kinds, **(WIDE if kinds is Q4_K_M else {}))
    folder = resolve(str(gguf), tmp_path / "cache").path
    alone = passes(TransformersTarget(config(folder, 1)))
    target = TransformersTarget(config(folder, 2, kernels_dir=tmp_path / "choices"), launch_child)
    try:
        assert library() is None or target.kernels.weights == "as_stored"
        assert torch.equal(passes(target), alone)
    finally:
        target.shutdown()


@pytest.mark.exhaustive
def test_threads_of_gloo_give_way(split: TransformersTarget) -> None:
    """This process's, which sends; the thread that made them is as it was."""
    assert split.vocab_size
    threads = {int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    policies = {os.sched_getscheduler(thread) for thread, name in threads.items() if name == "gloo_tcp_loop"}
    assert policies == {os.SCHED_BATCH} and os.sched_getscheduler(0) == os.SCHED_OTHER


def test_every_stage_gets_a_share_of_the_layers(model: Path) -> None:
    for stages in range(1, LAYERS + 1):
        shares = split_layers(config(model, stages))
        assert [layer for share in shares for layer in share] == list(range(LAYERS))
        assert len(shares) == stages
        assert all(shares)


def test_more_stages_than_layers(model: Path) -> None:
    with refuses(ConfigurationError, field="verifier.stages", value=6):
        TransformersTarget(config(model, 6), launch_child)


def test_a_model_that_changes_what_enters_its_layers_cannot_be_split(tmp_path: Path) -> None:
    make("dory", tmp_path)
    with refuses(ConfigurationError, field="verifier.stages", value=2):
        ModelSlice(config(tmp_path, 2), 1)


def test_orders_survive_the_way() -> None:
    orders = Orders()
    orders.open("a", 1, [4, 5])
    orders.open("b", 0, [7])
    orders.grow("b", [9])
    orders.keep("b", 3, [0, 2])
    orders.load_state("a", 64, 5)
    orders.save_state("b", 128, 6)
    orders.adapt("b", 4)
    orders.drop_adapter(3)
    orders.draft_by(5)
    batch = (
        Rows(request_id="b", context=3, tokens=(1, 2, 3), parents=(-1, 0), logits=2, noise=(2,)),
        Rows(request_id="a", context=64, tokens=(8,), logits=1, layers=(2, -1)),
    )
    drawn = Draw(temperature=0.1, seed=2**64 - 1, top_k=7)
    sought = Sought(ids=8, draws=(None, drawn))
    orders.exchange(7)
    orders.drop_weights(6)
    orders.run(batch, sought, version=7)
    orders.close("b")
    orders.close("unknown")
    orders.beat()
    read = list(read_orders(orders.take().tolist()))
    assert [op for op, _, _ in read] == [
        Op.OPEN, Op.OPEN, Op.GROW, Op.KEEP, Op.LOAD_STATE, Op.SAVE_STATE, Op.ADAPT, Op.DROP_ADAPTER, Op.DRAFT_BY,
        Op.EXCHANGE, Op.DROP_WEIGHTS, Op.PASS, Op.CLOSE, Op.BEAT,
    ]  # fmt: skip
    assert [arguments for _, arguments, _ in read] == [
        (0, 1, 4, 5), (1, 0, 7), (1, 9), (1, 3, 0, 2), (0, 64, 5), (1, 128, 6), (1, 4), (3,), (5,), (7,), (6,), (7, *sought.numbers()), (1,), ()
    ]  # fmt: skip
    assert [(rows.request_id, rows.context, rows.tokens, rows.parents, rows.layers, rows.noise) for rows in read[11][2]] == [
        ("1", 3, (1, 2, 3), (-1, 0), (), (2,)),
        ("0", 64, (8,), (), (2, -1), ()),
    ]
    assert Sought.of_numbers(read[11][1][1:]) == sought
    for broken in ([99], [Op.KEEP, 1, 2, 3, 0], [Op.PASS, 1, 0, 1, 0], [Op.ADAPT, 1], [Op.DRAFT_BY]):
        with pytest.raises(ValueError):
            list(read_orders(broken))


def test_a_specification_survives_the_way(model: Path) -> None:
    adapters = {"lora_modules": {"one": "/adapters/one"}, "lora_folders": (Path("/adapters"),)}
    spec = StageSpec(config=config(model, 3, **adapters), stage=1, host="127.0.0.1", port=5)
    assert spec_from_json(spec_to_json(spec)) == spec


def passes(target: TransformersTarget) -> torch.Tensor:
    """Two prompts, two trees, what is kept of them, and what follows: rows move onto others', over a border of blocks."""
    made = []
    assert target.open("a", 200)
    assert target.open("b", 200)
    target.begin([Rows(request_id="a", context=0, tokens=tuple(range(5, 75)), logits=1)], whole=True)
    target.begin([Rows(request_id="b", context=0, tokens=tuple(range(90, 30, -1)), logits=1)], whole=True)
    made += [target.end_pass(), target.end_pass()]
    target.keep("a", 0, range(70))
    target.keep("b", 0, range(60))
    tree = Rows(request_id="a", context=70, tokens=(9, 1, 2, 3, 4), parents=(-1, -1, 1, 2), logits=5)
    longer = Rows(request_id="b", context=60, tokens=(3, 8, *range(1, 8)), parents=(-1, -1, *range(1, 7)), logits=9)
    made += target.forward([tree, longer])
    target.keep("a", 70, [0, 2, 3])
    target.keep("b", 60, [0, *range(2, 8)])
    made += target.forward([Rows(request_id=name, context=at, tokens=(6,), logits=1) for name, at in (("a", 73), ("b", 67))])
    target.close("a")
    target.close("b")
    return torch.cat(made)


@pytest.mark.exhaustive
def test_the_same_bits_from_two_stages(split: TransformersTarget, whole: torch.Tensor) -> None:
    assert torch.equal(passes(split), whole)
    assert len(split.pool.keys) < LAYERS


@pytest.mark.exhaustive
@pytest.mark.parametrize("stages", [3, LAYERS])
def test_the_same_bits_from_more_stages(model: Path, whole: torch.Tensor, stages: int) -> None:
    target = TransformersTarget(config(model, stages), launch_fork)
    try:
        assert torch.equal(passes(target), whole)
        assert len(target.pool.keys) < LAYERS
    finally:
        target.shutdown()


@pytest.mark.exhaustive
def test_stages_that_disagree_on_a_length_stop(split: TransformersTarget, whole: torch.Tensor) -> None:
    split.open("a", 100)
    split.forward([Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1)])
    split.keep("a", 0, [0, 1])
    with pytest.raises(TargetLost, match="disagree"):
        split.forward([Rows(request_id="a", context=3, tokens=(4,), logits=1)])
    split.recover()
    assert torch.equal(passes(split), whole)


@pytest.mark.exhaustive
def test_a_pass_that_fails_in_a_stage_fails_alone(split: TransformersTarget, whole: torch.Tensor) -> None:
    split.open("a", 100)
    with pytest.raises(Internal, match="log"):
        split.forward([Rows(request_id="a", context=0, tokens=(10**6,), logits=1)])
    split.close("a")
    assert torch.equal(passes(split), whole)


@pytest.mark.exhaustive
def test_a_pass_is_laid_out_while_the_stage_before_computes(
    split: TransformersTarget, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, receive, laid_out = split._part, split._earlier.finish, []

    def received(part: ModelSlice) -> Activations:
        laid_out.append(part._prepared is not None)
        return receive(part)

    monkeypatch.setattr(split._earlier, "finish", received)
    assert torch.equal(passes(split), whole)
    assert laid_out and all(laid_out) and part._prepared is None
    # One that cannot be is received all the same, or the next pass would get it.
    split.open("a", 200)
    too_many = tuple(range(-1, 128))
    with pytest.raises(Internal, match="log"):
        split.forward([Rows(request_id="a", context=0, tokens=(1,) * 130, parents=too_many, logits=1)])
    split.close("a")
    assert torch.equal(passes(split), whole)


def stage_processes() -> list[psutil.Process]:
    """Those that this process has started, the first stage first."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "services.verifier.stages.process" in child.cmdline()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_that_hangs_is_lost_after_the_pass_timeout(
    model: Path, whole: torch.Tensor, frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = forked_stages()
    # One that hangs never ends by itself, however long it is given.
    monkeypatch.setattr(upstream, "_PATIENCE_S", 0.5)
    target = TransformersTarget(config(model, 3, pass_timeout_s=2.0), launch_fork)
    try:
        started = [process for process in forked_stages() if process not in others]
        assert target.open("a", 100)
        target.forward([Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1)])
        target.keep("a", 0, [0, 1, 2])
        os.kill(started[frozen].pid, signal.SIGSTOP)
        target.begin([Rows(request_id="a", context=3, tokens=(4,), logits=1)])
        start = time.monotonic()
        with pytest.raises(TargetLost, match=r"stage 1 has not answered for 2 s \(pass_timeout_s\)"):
            target.finish()
        assert time.monotonic() - start >= 2
        target.recover()
        # Neither the one that hung nor those that waited for it are left.
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)
        assert torch.equal(passes(target), whole)
        # Without a pass under way it is found by asking.
        target.beat()
        os.kill([process for process in forked_stages() if process not in others][frozen].pid, signal.SIGSTOP)
        with monkeypatch.context() as shorter:
            shorter.setattr(upstream, "_BEAT_S", 1.0)
            with pytest.raises(TargetLost, match="stage 1 has not answered for 1 s"):
                target.beat()
        target.recover()
        target.beat()
        assert torch.equal(passes(target), whole)
    finally:
        target.shutdown()


@asynccontextmanager
async def served(model: Path, stages: int, *flags: str) -> AsyncIterator[Pipeline]:
    async with pipeline(model, f"verifier.stages={stages}", *flags) as running:
        yield running


async def ask(running: Pipeline, strategy: str, number: int, **sampling: object) -> list[int]:
    prompt = tuple([40 + number, 41, 42] * 12)
    params = RequestedSampling(max_tokens=60, ignore_eos=True, seed=number, **sampling)  # type: ignore[arg-type]
    request = ClientRequest(input=prompt, sampling=params, strategy=strategy, tenant="")
    events = running.router.generate(request)
    return [token async for event in events if isinstance(event, TextChunk) for token in event.token_ids]


@pytest.mark.exhaustive
async def test_every_strategy_says_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    services_fork(monkeypatch)
    strategies = known.served(known.StrategyConfig())
    wanted = {}
    async with pipeline(model) as running:
        for number in range(4):
            for temperature in (0.0, 1.0):
                wanted[number, temperature] = await ask(running, "autoregressive", number, temperature=temperature)
    # A stage between the first and the last one sees what those two do, so two stages need no strategy but the widest.
    for stages, asked in ((2, ["auto"]), (3, strategies)):
        async with served(model, stages) as running:
            for strategy in asked:
                keys = list(wanted)
                answers = await asyncio.gather(*(ask(running, strategy, n, temperature=t) for n, t in keys))
                assert dict(zip(keys, answers, strict=True)) == wanted, (stages, strategy)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_stage_that_is_gone_comes_back_and_no_token_is_lost(
    model: Path, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one that is killed is started as the product starts it.
    if fault is signal.SIGSTOP:
        services_fork(monkeypatch)
        monkeypatch.setattr(upstream, "_PATIENCE_S", 0.5)
    async with pipeline(model) as running:
        wanted = [await ask(running, "prompt_lookup", number) for number in range(3)]
    async with served(model, 2, "verifier.pass_timeout_s=3") as running:
        (child,) = forked_stages() if fault is signal.SIGSTOP else stage_processes()[-1:]
        asked = [asyncio.create_task(ask(running, "prompt_lookup", number)) for number in range(3)]
        while not running.verifier.loop.running:
            await asyncio.sleep(0.005)
        os.kill(child.pid, fault)
        assert await asyncio.gather(*asked) == wanted
        assert running.verifier.healthy
        assert (await running.verifier.describe()).free_blocks == (await running.verifier.describe()).total_blocks
