"""The first checks on a GPU, here with Triton's interpreter and a model of Hopper's products: they pass, and see faults."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from typing_extensions import override

pytest.importorskip("triton")
from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import gpu, layer_gate
from benchmarks.gpu_check.attention_gate import attention
from benchmarks.gpu_check.bare_model import BareModel, CapturedPass
from benchmarks.gpu_check.captured_gate import captured_passes
from benchmarks.gpu_check.ceilings import how_it_adds, judge_ceilings
from benchmarks.gpu_check.decoding_gate import judge_decoding
from benchmarks.gpu_check.drawing_gate import drawing
from benchmarks.gpu_check.layer_gate import CUBLAS, TRITON, judge_layers, linear_layers, shapes_of
from benchmarks.gpu_check.model_gates import PASSES, judge_bits, judge_costs, same_bits
from benchmarks.gpu_check.needs import unmet
from benchmarks.gpu_check.packings import bushy_tree, rows_of, starts_of, tree
from benchmarks.gpu_check.sizes import llama_8b
from benchmarks.gpu_check.verdicts import GateVerdict, GpuGate, as_object, page, run_gates
from benchmarks.inflate import Size
from services.verifier.choosing.device_choice import winners_by_torch
from services.verifier.kernels.triton.row_products import RowLinear
from services.verifier.kernels.triton.virtual_groups import VirtualGroup, pack
from services.verifier.model.gpu_here import without_kernels
from services.verifier.model.target_port import Rows
from tests.kernels.triton_interpreter import hopper

PASSED = GateVerdict(result="pass", found="as on paper", follows="go on", figures={"speed": 3.0}, table=[["rows"], ["16"]])


def siblings_seen(*given: Any) -> list[list[VirtualGroup]]:
    """A fault: a tree's rows see every node of their copies."""
    made: list[list[VirtualGroup]] = []
    for tile in pack(*given):
        made.append([])
        for one in tile:
            full = (1 << len(one.slots)) - 1
            made[-1].append(replace(one, masks=tuple(full if mask else 0 for mask in one.masks)))
    return made


def test_a_run_its_page_and_its_file() -> None:
    """A gate that raises has failed; the one that would take too long is not run, those after it are."""
    now = [0.0]

    def slow() -> GateVerdict:
        now[0] += 90
        return PASSED

    def broken() -> GateVerdict:
        raise RuntimeError("out of\nmemory | 3")

    gates = [
        GpuGate(name="G1", asks="slow", run=slow, seconds=10),
        GpuGate(name="G2", asks="broken", run=broken, seconds=5),
        GpuGate(name="G3", asks="long", run=slow, seconds=30),
        GpuGate(name="G4", asks="short", run=lambda: PASSED, seconds=10),
    ]
    lines: list[str] = []
    verdicts = run_gates(gates, 110, lines.append, clock=lambda: now[0])
    assert [verdicts[gate.name].result for gate in gates] == ["pass", "fail", "not run", "pass"]
    assert [line.split()[0] for line in lines] == ["G1", "G2", "G4"]
    assert verdicts["G2"].found == "it raised RuntimeError: out of memory | 3"
    stored = json.loads(json.dumps(as_object({"GPU": "none"}, verdicts)))
    assert stored["gates"]["G1"]["figures"] == {"speed": 3.0}
    text = page({"GPU": "none"}, gates, verdicts)
    assert "| G3 | long | **not run** | 20 s are left, it may take 30 | run it alone: --only G3 |" in text
    assert "out of memory \\| 3" in text and "## G4: short\n\n| rows |\n|---|\n| 16 |" in text


def test_what_was_found_is_kept_and_nothing_runs_on_a_broken_gpu(tmp_path: Path) -> None:
    def broken() -> GateVerdict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    gates = [
        GpuGate(name="G1", asks="good", run=lambda: PASSED, seconds=1),
        GpuGate(name="G2", asks="broken", run=broken, seconds=1),
        GpuGate(name="G3", asks="behind it", run=lambda: PASSED, seconds=1),
    ]
    seen: list[list[str]] = []

    def keep(verdicts: Mapping[str, GateVerdict]) -> None:
        command.write(tmp_path, {"GPU": "none"}, gates, verdicts)
        stored = json.loads((tmp_path / "gpu_check.json").read_text())["gates"]
        seen.append([stored[gate.name]["result"] for gate in gates])

    verdicts = run_gates(gates, 100, lambda line: None, keep=keep, works=lambda: False)
    assert seen == [
        ["not run"] * 3, ["pass", "not run", "not run"], ["pass", "fail", "not run"], ["pass", "fail", "not run"],
    ]  # fmt: skip
    assert verdicts["G3"].found == "since an error in G2 nothing more runs on the GPU in this process"
    assert "| G3 | behind it | **not run** | since an error in G2" in (tmp_path / "gpu_check.md").read_text()
    assert run_gates(gates, 100, lambda line: None)["G3"].result == "pass"


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main([]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("gpu-check: no GPU") and said.err.count("\n") == 1 and not said.out


def test_a_python_without_its_packages_is_told_in_one_line() -> None:
    # Without its site there are none.
    done = subprocess.run([sys.executable, "-S", "-m", "benchmarks.gpu_check"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert "has no torch and no triton and no transformers: install it there" in done.stderr


def test_a_python_that_is_too_old() -> None:
    assert unmet() == ""
    assert unmet((3, 10, 12)).startswith("this is Python 3.10: needs 3.11 or later")


def test_gpus_that_are_too_old_and_drivers() -> None:
    assert gpu.too_old("H100", (9, 0)) == gpu.too_old("A100", (8, 0)) == ""
    assert "T4 is too old: its compute capability is 7.5, bfloat16 needs 8.0 (Ampere)" in gpu.too_old("T4", (7, 5))
    version = SimpleNamespace(cuda="13.0")
    said = "The NVIDIA driver on your system is too old (found version 11040)."

    def warned() -> bool:
        warnings.warn(f"CUDA initialization: {said}", stacklevel=1)
        return False

    def raised() -> None:
        raise RuntimeError(said)

    def missing(is_available: Callable[[], bool], init: Callable[[], None]) -> str:
        return gpu.missing(SimpleNamespace(is_available=is_available, init=init), version)

    told = missing(warned, lambda: None)
    assert "driver is too old for torch" in told and "11040" in told
    # torch warns once in a process; then the error of its start tells.
    assert missing(lambda: False, lambda: None).startswith("no GPU: torch ")
    told = missing(lambda: False, raised)
    assert "driver is too old for torch" in told and "11040" in told


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((12, 0), ["sm_90", "sm_100", "compute_100"], True),
        ((12, 0), ["sm_90a", "sm_100"], False),
        ((7, 0), ["sm_75", "compute_90"], False),
        ((9, 0), [], True),
    ],
)
def test_gpus_for_which_torch_is_not_built(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    cuda = SimpleNamespace(get_device_capability=lambda _: capability, get_arch_list=lambda: built)
    said = without_kernels(torch.device("cuda", 0), cuda)
    assert (said == "") == runs and (runs or f"is built for {', '.join(built)}, and the GPU's" in said)


def test_how_a_chip_adds() -> None:
    with hopper():
        assert how_it_adds("cpu").result == "pass"
    with hopper(group=8):
        found = how_it_adds("cpu")
    assert found.result == "fail" and found.found == "not so: any order within sixteen"
    with hopper(group=64):
        assert "an order across" not in how_it_adds("cpu").found
        assert how_it_adds("cpu").result == "fail"


@pytest.mark.exhaustive
def test_layers_whose_rows_depend_on_others_are_seen() -> None:
    def routes(weight: torch.Tensor) -> dict[str, layer_gate.Route]:
        def uneven(rows: torch.Tensor) -> torch.Tensor:
            halves = [functional.linear(rows[:, part], weight[:, part]) for part in (slice(0, 150), slice(150, 300))]
            return sum(halves, torch.zeros(())) if len(rows) > 30 else functional.linear(rows, weight)

        return {CUBLAS: uneven, TRITON: RowLinear(weight)}

    with hopper():
        found = linear_layers({"down": (48, 300)}, "cpu", compared=(1, 17, 40), timed=(), routes_of=routes)
    assert found.result == "pass" and found.found == f"equal bits by {TRITON}; not by {CUBLAS}: down (40 rows)"
    assert found.follows == f"use {TRITON}"
    speeds = {CUBLAS: {"down": {16: 900.0}}, TRITON: {"down": {16: 1800.0}}}
    assert judge_layers({CUBLAS: [], TRITON: []}, speeds, []).follows == f"use {TRITON}, the faster one"
    assert judge_layers({CUBLAS: ["x"], TRITON: ["y"]}, speeds, []).result == "fail"
    assert shapes_of(llama_8b(32), 128256)["query, key, value"] == (6144, 4096)


def test_layers_are_checked_by_the_route_that_a_verifier_takes() -> None:
    """A verifier forbids cuBLASLt to split sums before its first product; G2 does so before it makes a route."""
    events: list[str] = []

    def routes(weight: torch.Tensor) -> dict[str, layer_gate.Route]:
        events.append("made")
        return dict.fromkeys((CUBLAS, TRITON), lambda rows: rows)

    def prepare() -> None:
        events.append("forbidden")

    linear_layers({"down": (48, 300)}, "cpu", compared=(1,), timed=(), routes_of=routes, prepare=prepare)
    assert events == ["forbidden", "made"]


@pytest.mark.exhaustive
def test_attention_passes_and_a_wrong_mask_does_not() -> None:
    with hopper():
        found = attention("cpu", length=24, depth=3, others=3, shapes=[(2, 16, None)], rounded=[(2, 16, None)])
        wrong = attention("cpu", length=24, depth=3, others=3, shapes=[(2, 16, None)], rounded=[], pack=siblings_seen)
        rounded = attention("cpu", length=24, depth=3, others=3, shapes=[], rounded=[(2, 16, None)], pack=siblings_seen)
    assert found.result == "pass", found.found
    assert rounded.result == "fail" and "in eight bits" in rounded.found
    assert wrong.result == "fail" and "tree" in wrong.found and "prompt" not in wrong.found


@pytest.mark.exhaustive
def test_a_whole_models_logits() -> None:
    """In one pass, in two chunks, in a tree beside another request, and alone."""
    size = Size(width=48, intermediate=40, layers=1, heads=3, kv_heads=1, head_size=16)
    model = BareModel(size, 40, lengths=[128, 128], dtype=torch.float32, device="cpu")
    normed = BareModel(size, 40, lengths=[128, 128], dtype=torch.float32, device="cpu", head_norms=True)
    assert model.left == normed.left == []
    with hopper():
        found = same_bits({"plain": model, "normed": normed}, length=9, depth=2, others=2, vocabulary=40)
        made = model.logits([rows_of("1", 0, range(5))])
    assert found.result == "pass" and found.figures["compared"] == 36, found.found
    torch.manual_seed(0)
    model.config._attn_implementation = "eager"
    expected = LlamaForCausalLM(model.config)(torch.arange(5)[None]).logits[0]
    assert torch.allclose(made, expected, atol=1e-4)
    wrong = judge_bits(["tree, position 3"], 15, ["Odd"])
    assert wrong.result == "fail" and "Odd" in wrong.follows


@pytest.mark.exhaustive
def test_ceilings_and_costs() -> None:
    assert judge_ceilings(3.2, 700.0).result == "pass"
    assert "nvidia-smi" in judge_ceilings(0.3, 700.0).follows
    floors = dict.fromkeys(PASSES, 4.0)
    assert judge_costs(dict.fromkeys(PASSES, 5.0), floors).result == "pass"
    slow = judge_costs(dict.fromkeys(PASSES, 8.0), floors)
    assert slow.result == "fail" and slow.found.startswith("plain decoding runs at 50%")
    steep = judge_costs({**dict.fromkeys(PASSES, 5.0), (64, 256, 1): 8.0}, floors)
    assert steep.result == "fail" and "64 rows must cost" in steep.follows


def test_a_bushy_tree_holds_the_true_path() -> None:
    packed = bushy_tree(30, 8, 100)
    assert len(packed.parents) == 56 and [packed.shown[row] for row in packed.path] == list(range(30, 39))
    parents: Sequence[int] = (-2, *packed.parents)
    assert [parents[row] + 1 for row in packed.path[1:]] == list(packed.path[:-1])
    # The path's nodes have siblings, and those children of their own.
    assert all(packed.parents.count(packed.parents[node]) > 1 for node in packed.path[1:-1] if packed.parents[node] == -1)
    assert len({parent for parent in packed.parents if parent >= 0}) == 49


@pytest.mark.parametrize("seed", range(3))
def test_packings_hold_the_true_path(seed: int) -> None:
    packed = tree(30, 6, 4, 100, seed)
    assert [packed.shown[row] for row in packed.path] == list(range(30, 37))
    parents: Sequence[int] = (-2, *packed.parents)
    assert [parents[row] + 1 for row in packed.path[1:]] == list(packed.path[:-1])
    assert {62 - 4, 63, 64} <= set(starts_of(200, 12))


def test_make_gpu_check_runs_it() -> None:
    assert "-m benchmarks.gpu_check" in Path("Makefile").read_text().split("\ngpu-check:")[1].split("\n\n")[0]


@pytest.mark.exhaustive
def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    """Under the model of Hopper's products all gates but those of speed pass; so they do where tiles have 64 rows at least."""
    for further in ([], ["--least-rows", "64", "--only", "G2,G3,G5"]):
        with hopper():
            assert command.main(["--device", "cpu", "--out", str(tmp_path), *further]) == 0
        gates = json.loads((tmp_path / "gpu_check.json").read_text())["gates"]
        assert {name for name, gate in gates.items() if gate["result"] == "not measured"} == {"G1", "G6"} & set(gates)
        assert {gate["result"] for gate in gates.values()} <= {"pass", "not measured"}, gates
    assert "verdicts on speed are for GPUs" in (tmp_path / "gpu_check.md").read_text()


def test_draws_by_another_law_or_noise_are_seen() -> None:
    assert drawing("cpu", 2000, 50, winners=winners_by_torch).result == "pass"

    def hot(logits: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return winners_by_torch(0.8 * logits, *given)

    wrong = drawing("cpu", 2000, 50, winners=hot)
    assert wrong.result == "fail" and wrong.figures["differ"] > 0 and wrong.figures["standard_deviations"] > 5

    def other_seeds(logits: torch.Tensor, least: torch.Tensor, seeds: Sequence[int], *given: Any) -> Any:
        return winners_by_torch(logits, least, [seed + 10**6 for seed in seeds], *given)

    wrong = drawing("cpu", 2000, 50, winners=other_seeds)
    assert wrong.result == "fail" and wrong.figures["standard_deviations"] < 5


def test_tokens_that_depend_on_the_load_are_seen() -> None:
    assert judge_decoding([], {1: 120.0, 8: 800.0}).found.endswith("tokens per second: 120 with 1, 800 with 8 at a time")
    wrong = judge_decoding(["request 0 beside 7"], {1: 120.0, 8: 800.0})
    assert wrong.result == "fail" and wrong.figures["differ"] == ["request 0 beside 7"]


@pytest.mark.exhaustive
def test_a_captured_pass_that_keeps_what_filled_it_before_is_seen() -> None:
    class FilledOnce(BareModel):
        @override
        def captured(self, batch: Sequence[Rows]) -> CapturedPass:
            made = super().captured(batch)
            made.fill = lambda batch: None  # type: ignore[method-assign]
            return made

    size = Size(width=48, intermediate=40, layers=1, heads=3, kv_heads=1, head_size=16)
    model = FilledOnce(size, 40, lengths=[128, 128], dtype=torch.float32, device="cpu")
    with hopper():
        found = captured_passes(model, length=9, depth=2, others=2, vocabulary=40)
    assert found.result == "fail" and "one row, filling 0, row 0" in found.found


def test_a_race_is_seen() -> None:
    """A kernel whose second run gives other bits."""
    made = iter([torch.zeros(1, 3), torch.ones(1, 3)])
    model = BareModel.__new__(BareModel)
    model.unsteady = 0
    model._laid_out = lambda batch: None  # type: ignore[assignment,return-value]
    model.launch = lambda laid_out: next(made)  # type: ignore[method-assign]
    model.logits([])
    assert model.unsteady == 1
    runs = iter([2.0, 2.0, 3.0])
    assert layer_gate.differing(lambda rows: rows * next(runs), torch.ones(16, 2), (16,)) == [16]


@pytest.mark.exhaustive
def test_it_needs_torch_triton_and_transformers_alone() -> None:
    others = "ray grpc pydantic psutil gguf faiss redis llguidance google.protobuf accelerate outrider"
    script = f"import sys; sys.modules.update(dict.fromkeys({others.split()})); import benchmarks.gpu_check.__main__"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
