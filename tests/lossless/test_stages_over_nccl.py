"""Activations that travel apart from orders, as over NCCL: the same bits; what hangs, dies or disagrees is noticed.

NCCL needs GPUs. In its place a group of gloo's carries the activations between two processes; all else is what runs there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from services.verifier.config import TargetConfig
from services.verifier.model import checked_target
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.verifier.stages import exchange, upstream, ways
from services.verifier.stages.ways import GLOO, NCCL, device_of_process, way_of
from speculation.errors import ConfigurationError, Internal, TargetLost
from tests.engine.stage_forks import forked_stages
from tests.engine.threaded_group import ThreadedGroup, as_nccl, launch_as_nccl
from tests.lossless.test_stages import passes
from tests.running.refusals import refuses
from tests.tiny_models.tiny import make_tiny_model

pytestmark = pytest.mark.xdist_group("stages")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def config(model: Path, stages: int) -> TargetConfig:
    return TargetConfig(
        model_path=str(model), kv_cache_tokens=1024, max_model_len=512, threads=1, stages=stages, pass_timeout_s=3.0
    )


@pytest.fixture
def over_nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[psutil.Process]]:
    """Gives the stages' processes that a test has started and that run."""
    # What ``as_nccl`` replaces is put back.
    for module, name in ((ways, "identity"), (exchange, "identity"), (ways, "nccl_group")):
        monkeypatch.setattr(module, name, getattr(module, name))
    as_nccl()
    others = forked_stages()
    return lambda: [each for each in forked_stages() if each not in others]


@pytest.fixture
def target(model: Path, over_nccl: object) -> Iterator[TransformersTarget]:
    made = TransformersTarget(config(model, 2), launch_as_nccl)
    yield made
    made.shutdown()


def group_of(target: TransformersTarget) -> ThreadedGroup:
    earlier = target._earlier
    assert isinstance(earlier, upstream.Upstream) and earlier._exchange is not None
    way = earlier._exchange._activations
    assert isinstance(way, ways.NcclWay) and isinstance(way._group, ThreadedGroup)
    return way._group


@pytest.mark.exhaustive
def test_two_processes_say_what_one_does_and_faults_are_noticed(
    model: Path, target: TransformersTarget, over_nccl: Callable[[], list[psutil.Process]]
) -> None:
    whole = passes(TransformersTarget(config(model, 1)))
    assert not group_of(target).aborted
    assert torch.equal(passes(target), whole)
    # Hidden states of an earlier stage's layer travel the same way.
    assert target.open("a", 100)
    target.forward([Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1, layers=(0, 1))])
    assert target.features("a", [0, 1, 2]).rows == 3
    # A pass that fails there fails alone.
    target.close("a")
    assert target.open("a", 100)
    with pytest.raises(Internal, match="log"):
        target.forward([Rows(request_id="a", context=0, tokens=(10**6,), logits=1)])
    target.close("a")
    # One that disagrees.
    assert target.open("a", 100)
    target.forward([Rows(request_id="a", context=0, tokens=(1, 2, 3), logits=1)])
    target.keep("a", 0, [0, 1])
    with pytest.raises(TargetLost, match="disagree"):
        target.forward([Rows(request_id="a", context=3, tokens=(4,), logits=1)])
    target.recover()
    assert torch.equal(passes(target), whole)
    # One that hangs, and one that is gone.
    for fault, said in (
        (signal.SIGSTOP, r"stage 0 has not answered for 3 s \(pass_timeout_s\)"),
        (signal.SIGKILL, "stage 0"),
    ):
        assert target.open("a", 100)
        os.kill(over_nccl()[-1].pid, fault)
        target.begin([Rows(request_id="a", context=0, tokens=(4,), logits=1)])
        with pytest.raises(TargetLost, match=said):
            target.finish()
        left = group_of(target)
        target.recover()
        assert left.aborted and not group_of(target).aborted
    assert torch.equal(passes(target), whole)


@pytest.mark.exhaustive
def test_activations_that_never_come_are_given_up(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header has come, what it announces does not: NCCL would wait for ever."""
    group = group_of(target)
    monkeypatch.setattr(exchange.Exchange, "receive_activation", _taken_away(exchange.Exchange.receive_activation))
    assert target.open("a", 100)
    target.begin([Rows(request_id="a", context=0, tokens=(4,), logits=1)])
    with pytest.raises(TargetLost, match="stage 0 has not answered for 3 s"):
        target.finish()
    assert group.aborted


def _taken_away(receive: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Takes what was sent, so that nothing is left to come."""

    def twice(self: exchange.Exchange, *given: Any) -> torch.Tensor:
        receive(self, *given)
        return receive(self, *given)

    return twice


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (2, 2)])
def test_ranks_gather_by_a_group_of_their_own(
    tmp_path: Path, over_nccl: Callable[[], list[psutil.Process]], ranks: int, stages: int
) -> None:
    """As on GPUs: what layers make goes by the group of a stage's ranks, what ranks agree on by gloo beside it."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = make_tiny_model(tmp_path, num_hidden_layers=2, **sizes)
    whole = passes(TransformersTarget(config(folder, 1)))
    made = TransformersTarget(replace(config(folder, stages), tensor_parallel_size=ranks), launch_as_nccl)
    try:
        earlier = made._earlier
        assert isinstance(earlier, upstream.Upstream) and earlier._exchange is not None
        group = earlier._exchange.rank_group
        assert group is not None and isinstance(group._group, ThreadedGroup)
        before = group._group.gathered
        assert torch.equal(passes(made), whole) and made.exact
        # Four in each layer, and those of the logits; of the embeddings where the stage is the first.
        assert group._group.gathered - before > 4
        # A rank that is gone is noticed before its next pass, and the group made anew.
        assert made.open("a", 100)
        os.kill(over_nccl()[-1].pid, signal.SIGKILL)
        with pytest.raises(TargetLost):
            made.forward([Rows(request_id="a", context=0, tokens=(4,), logits=1)])
        made.recover()
        assert torch.equal(passes(made), whole) and group._group.aborted
    finally:
        made.shutdown()


def test_who_travels_how() -> None:
    assert way_of(["", ""]) == GLOO and way_of(["a", ""]) == GLOO and way_of(["a", "b", "c"]) == NCCL
    with refuses(ConfigurationError, says="processes 0 and 2 of the 3 are on one GPU (a)"):
        way_of(["a", "b", "a"])


def test_each_stage_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [device_of_process("cuda", stage, 4) for stage in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert device_of_process("cuda", 1, 5) == "cuda" and device_of_process("cuda", 0, 1) == "cuda"
    assert device_of_process("cuda:2", 1, 2) == "cuda:2" and device_of_process("cpu", 1, 2) == "cpu"


def test_memory_is_asked_of_the_gpu_of_the_last_stage(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(asked: TargetConfig, least: int) -> None:
        raise ConfigurationError("no room", field=asked.device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(checked_target, "check_device", lambda _: None)
    monkeypatch.setattr(checked_target, "check_memory", refused)
    with refuses(ConfigurationError, "cuda:1"):
        TransformersTarget(replace(config(model, 2), device="cuda"))


@pytest.mark.exhaustive
def test_two_stages_on_one_gpu_do_not_start(
    model: Path, monkeypatch: pytest.MonkeyPatch, over_nccl: Callable[[], list[psutil.Process]]
) -> None:
    monkeypatch.setattr(exchange, "way_of", lambda identities: way_of(["one"] * len(identities)))
    with refuses(ConfigurationError, says="processes 0 and 1 of the 2 are on one GPU"):
        TransformersTarget(config(model, 2), launch_as_nccl)
    assert not over_nccl()


@pytest.mark.parametrize("later", ["the verifier", "a stage"])
def test_the_second_stage_on_a_gpu_is_told_before_it_loads(later: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "identity", lambda device: "one" if device.type == "cuda" else "")
    meeting, gpu, cpu = exchange.Meeting("127.0.0.1"), torch.device("cuda"), torch.device("cpu")

    def as_stage(rank: int, device: torch.device) -> None:
        exchange.claim_gpu(meeting.host, meeting.port, rank, 3, device)

    as_stage(0, cpu)
    meeting.claim(2, 3, cpu)
    as_stage(1, gpu) if later == "the verifier" else meeting.claim(2, 3, gpu)
    with refuses(ConfigurationError, says="processes 1 and 2 of the 3 are on one GPU"):
        meeting.claim(2, 3, gpu) if later == "the verifier" else as_stage(1, gpu)
