"""``outrider bench host``: the real loop on a target that takes no time. How long it takes is asserted nowhere."""

import gc
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.host.gpu_layout import GpuLayout
from benchmarks.host.loads import STANDING, HostLoad, read_load
from benchmarks.host.measure import BesideGpu, HostCost, StepWindow, measure, soak
from benchmarks.host.null_target import choices_of, scripted_text
from benchmarks.host.report import beside_line, figures_line, memory_verdict
from cli.main import app
from services.verifier.attention.calls import Call
from services.verifier.attention.fixed import Largest
from services.verifier.kv_cache.pool import KVPool
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


def test_a_load_is_read_from_its_name() -> None:
    assert read_load("64x4:blend") is STANDING[2]
    assert read_load("3x8:suffix") == HostLoad(requests=3, nodes=8, strategy="suffix")
    assert read_load("7").name == "7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "4x",
        "4x2",
        "x2:blend",
        "4x2:autoregressive",
        "4:blend",
        "4x2:nobody",
        "9999",
        pytest.param("9" * 5000, id="digits"),
    ],
)
def test_a_load_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--loads"):
        read_load(text)


def test_the_text_is_said_along_its_own_path() -> None:
    text = scripted_text(1, 40)
    # Two nodes say what the text says, one below them and one beside them do not, nor what hangs on that.
    tokens = (text[10], text[11], text[12], 0, 0, text[12])
    assert choices_of(text, 10, tokens, (-1, 0, 1, -1, 3)) == [text[11], text[12], text[13], 0, 0, 0]
    assert 0 not in text


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ["3", "2x4:blend"])
def test_a_load_is_measured_and_every_answer_is_the_text(name: str) -> None:
    load = read_load(name)
    found = measure(
        HostLoad(requests=load.requests, nodes=load.nodes, strategy=load.strategy, prompt=120), rounds=2, steps=4
    )
    assert len(found.windows) == 2
    assert all(window.tokens >= load.requests for window in found.windows)
    # Phrases come again, so that four nodes are drafted for each request.
    assert found.best.nodes <= load.nodes * load.requests
    assert sum(found.parts.values()) == pytest.approx(found.best.cpu_s)
    if load.nodes:
        assert found.best.nodes > 0
        assert found.best.tokens > load.requests


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ["2x4:blend", "3"])
def test_passes_are_laid_out_for_captured_graphs(name: str) -> None:
    pytest.importorskip("triton")
    load = read_load(name)
    short = HostLoad(requests=load.requests, nodes=load.nodes, strategy=load.strategy, prompt=120)
    found = measure(short, rounds=2, steps=4, pass_s=0.003)
    assert found.beside is not None and found.beside.host_s > 0 and found.beside.idle_s > 0
    assert all(window.wall_s > 0.003 and window.thread_s > 0 for window in found.windows)
    # The graph's time is waited for, and is none of the host's.
    assert found.phases["wait for the graph"] > 0.001 and found.phases["lay it out"] < 0.5
    assert found.phases["done while the graph runs"] > 0


def test_a_pass_that_no_graph_holds_is_launched() -> None:
    pytest.importorskip("triton")
    call = Call(entry=0, heads=4, kv_heads=1, key_size=16, value_size=16, scale=0.25)
    pool = KVPool([call], rows=640, dtype=torch.bfloat16, device=torch.device("cpu"), whole_rows=True)
    pool.assign("a", [0, 1, 2], 0)
    layout = GpuLayout(pool, Largest(rows=10, requests=2, positions=190), 0.0)
    fits = Rows(request_id="a", context=70, tokens=(1,) * 5, parents=(-1, 0, 1, 2), logits=5)
    assert layout.launch([fits])
    assert not layout.launch([Rows(request_id="a", context=0, tokens=(1,) * 40, logits=1)])
    assert layout.device.launches == 2


def test_without_triton_passes_cannot_be_laid_out_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "services.verifier.kernels.triton.tree_pass", None)
    with refuses(ConfigurationError, "--layout", "gpu"):
        measure(HostLoad(requests=1, prompt=40), rounds=1, steps=1, pass_s=0.001)


def test_the_last_line_of_a_gpu_has_its_goal() -> None:
    found = HostCost(load=STANDING[2], beside=BesideGpu(host_s=0.0009, idle_s=0.004))
    assert beside_line([found]) == ("host ms a step beside the GPU: 64 x 4 nodes blend 0.90 (goal 1.0), the GPU waits 4.00")


@pytest.mark.exhaustive
def test_requests_end_and_begin_in_a_soak() -> None:
    found = soak(HostLoad(requests=2, prompt=40), passes=700, stretches=4)
    assert [passes for passes, _ in found.memory] == [350, 525, 700]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["2", "2x4:blend"])
def test_requests_leave_nothing_that_only_a_look_for_garbage_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that serves looks for it seldom (``cluster.process.starting``)."""
    found: list[str] = []

    def look() -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found.extend(type(each).__module__ for each in gc.garbage)
        gc.garbage.clear()

    monkeypatch.setattr("benchmarks.host.measure.gc", SimpleNamespace(collect=look))
    load = read_load(name)
    gc.collect()
    gc.disable()
    try:
        soak(HostLoad(requests=load.requests, nodes=load.nodes, strategy=load.strategy, prompt=40), passes=600, stretches=2)
    finally:
        gc.enable()
    assert not [module for module in found if module.startswith(("services.", "speculation."))]


@pytest.mark.parametrize(("last", "flat"), [(101, True), (150, False)])
def test_memory_that_grows_is_told(last: int, flat: bool) -> None:
    found = HostCost(
        load=HostLoad(requests=1), memory=[(10 * n, size << 20) for n, size in enumerate((90, 100, 100, last), 1)]
    )
    assert memory_verdict(found)[0] is flat
    assert ("is flat" in memory_verdict(found)[1]) is flat


def test_the_last_line_has_the_figures() -> None:
    window = StepWindow(wall_s=0.002, cpu_s=0.001, tokens=64, nodes=0)
    found = HostCost(load=STANDING[0], windows=[window])
    assert figures_line([found]) == "host ms a step: 64 plain 1.00 (goal 0.4)"


def test_the_command_prints_one_object() -> None:
    ran = CliRunner().invoke(app, ["bench", "host", "--loads", "2", "--rounds", "1", "--steps", "2", "--json"])
    assert ran.exit_code == 0
    found = json.loads(ran.stdout.splitlines()[-1])["2"]
    assert found["requests"] == 2
    assert found["processors_ms"] > 0
    assert "plan the pass" in found["phases_ms"]
    assert "beside_gpu_ms" not in found


def test_the_command_prints_what_the_gpu_waits_for() -> None:
    pytest.importorskip("triton")
    options = ["--loads", "2", "--rounds", "1", "--steps", "2", "--layout", "gpu", "--pass-ms", "1"]
    ran = CliRunner().invoke(app, ["bench", "host", *options, "--json"])
    assert ran.exit_code == 0
    found = json.loads(ran.stdout.splitlines()[-1])["2"]
    assert found["beside_gpu_ms"] > 0 and found["gpu_waits_ms"] > 0
