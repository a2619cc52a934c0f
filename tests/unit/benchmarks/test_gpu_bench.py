"""The benchmark for GPUs, dry: its verdicts, its page, its refusals; and all of it on a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.gpu_bench import __main__ as program
from benchmarks.gpu_bench.speed_limits import verdicts_on
from benchmarks.gpu_bench.speed_parts import shown_fast_passes, shown_passes, shown_speed
from benchmarks.gpu_check.verdicts import GateVerdict, run_gates
from tests.tiny_models.tiny import make_tiny_model


def costs(exact: bool = True, **milliseconds: float) -> dict[str, Any]:
    own = {name.removeprefix("of_"): value for name, value in milliseconds.items()}
    about = {"floor_milliseconds": 4.2, "exact": exact, "linears": "triton" if exact else "torch"}
    return {"milliseconds_by_rows": own, "transformers": dict.fromkeys(own, 30.0), **about}


def results(plain: float, blend: float, equal: int = 6, alone: int = 1) -> dict[str, Any]:
    speeds = {("autoregressive", alone): plain, ("blend", alone): blend}
    speeds |= {("autoregressive", 64): 900.0, ("blend", 64): 1000.0, ("hf", alone): 30.0}
    return {
        "summary": [
            {"contestant": name, "concurrency": level, "tokens_per_second": {"median": speed}}
            for (name, level), speed in speeds.items()
        ],
        "lossless": {
            "checks": [
                {"contestant": "blend", "against": "plain", "equal": equal, "answers": 6},
                {"contestant": "autoregressive", "against": "plain", "equal": 6, "answers": 6},
                {"contestant": "blend", "against": "hf", "equal": 0, "answers": 6},
                {"contestant": "hf", "against": "plain", "equal": 0, "answers": 6},
            ]
        },
    }


GOOD = {
    "B1": GateVerdict(result="pass", found="15.0 GB of weights", follows="", figures={"bytes": 15e9}),
    "B2": shown_passes(costs(of_1=5.0, of_64=6.0)),
    "B3": shown_fast_passes(costs(exact=False, of_1=5.2, of_64=5.5)),
    "B4": shown_speed(results(200.0, 500.0)),
}


def judged(found: dict[str, GateVerdict], *, on_gpu: bool = True) -> dict[str, GateVerdict]:
    return run_gates(verdicts_on(found, on_gpu=on_gpu), 60, lambda line: None)


def test_the_parts_show_what_they_measured() -> None:
    assert GOOD["B2"].found == "1 row: 5.00 ms, reading the weights alone takes 4.20; passes are exact (layers by triton)"
    assert GOOD["B2"].table[1:] == [["1", "5.00", "1.00"], ["64", "6.00", "1.20"]]
    assert GOOD["B3"].table[1] == ["1", "5.20", "30.00"]
    assert GOOD["B4"].found == "autoregressive 200.0, blend 500.0 tokens per second, 1 at a time"
    assert GOOD["B4"].table == [
        ["tokens per second", "1 at a time", "64 at a time"],
        ["autoregressive", "200.0", "900.0"],
        ["blend", "500.0", "1000.0"],
        ["hf", "30.0", "-"],
    ]


def test_verdicts_on_a_gpu_that_does_what_it_should() -> None:
    found = judged(GOOD)
    assert [verdict.result for verdict in found.values()] == ["pass"] * 5
    assert [round(verdict.figures["value"], 3) for verdict in found.values()] == [0.84, 1.2, 1.091, 2.5, 0]
    assert [verdict.figures["limit"] for verdict in found.values()] == [0.7, 1.25, 1.15, 2.0, 0]
    assert found["V1"].found == "plain decoding runs at 84% of it: 5.00 ms, reading takes 4.20"
    assert found["V3"].found == "at worst 1.09 times the fast one, at 64 rows: 6.00 and 5.50 ms"
    assert found["V3"].table[1:] == [["1", "5.00", "5.20", "0.96"], ["64", "6.00", "5.50", "1.09"]]
    assert found["V5"].found == "all 12 answers are plain decoding's, token for token"


FAILING: dict[str, tuple[str, GateVerdict]] = {
    "V1": ("B2", shown_passes({**costs(of_1=5.0, of_64=6.0), "floor_milliseconds": 3.4})),
    "V2": ("B2", shown_passes(costs(of_1=4.5, of_64=5.7))),
    "V3": ("B3", shown_fast_passes(costs(of_1=5.2, of_64=5.2))),
    "V4": ("B4", shown_speed(results(200.0, 399.0))),
    "V5": ("B4", shown_speed(results(200.0, 500.0, equal=5))),
}


@pytest.mark.parametrize("name", FAILING)
def test_each_limit_can_be_missed_alone(name: str) -> None:
    part, measured = FAILING[name]
    found = judged({**GOOD, part: measured})
    assert [one for one, verdict in found.items() if verdict.result != "pass"] == [name]
    assert found[name].result == "fail" and found[name].follows not in ("", "as designed")


def test_what_was_not_measured_has_no_verdict() -> None:
    raised = GateVerdict(result="fail", found="it raised", follows="")
    for found, name, reason in (
        ({"B2": GOOD["B2"]}, "V3", "B3 was left out: run it, too"),
        ({**GOOD, "B2": raised}, "V1", "B2 has measured nothing: see its line"),
        ({**GOOD, "B2": shown_passes(costs(of_1=5.0))}, "V2", "--rows lacks 64"),
        ({**GOOD, "B4": shown_speed(results(200.0, 500.0, alone=4))}, "V4", "--concurrency lacks 1"),
        ({**GOOD, "B4": shown_speed({**results(1.0, 2.0), "lossless": {"checks": []}})}, "V5", "no answer was compared"),
    ):
        verdict = judged(found)[name]
        assert verdict.result == "not measured" and verdict.follows.startswith(reason)


def test_figures_to_which_a_limit_does_not_apply() -> None:
    for found, name, value, reason in (
        (
            {**GOOD, "B2": shown_passes(costs(exact=False, of_1=5.2))},
            "V3",
            1.0,
            "passes are not exact here (layers by torch)",
        ),
        ({**GOOD, "B1": replace(GOOD["B1"], figures={"bytes": 5e8})}, "V4", 2.5, "the model has 0.5 GB of weights"),
    ):
        verdict = judged(found)[name]
        assert verdict.result == "not measured" and verdict.follows.startswith(reason)
        assert verdict.figures["value"] == value and verdict.found != "-"


def test_on_a_cpu_only_equal_tokens_are_judged() -> None:
    found = judged({**GOOD, **dict(FAILING.values())}, on_gpu=False)
    assert [verdict.result for verdict in found.values()] == ["not measured"] * 4 + ["fail"]
    # The figures are there all the same.
    assert found["V1"].figures["value"] > 0 and found["V1"].follows == "this verdict is for GPUs"


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["gpu_bench"])
    assert program.main() == 2
    said = capsys.readouterr()
    assert said.err.startswith("gpu-bench: no GPU") and said.err.count("\n") == 1 and not said.out
    monkeypatch.setattr("sys.argv", ["gpu_bench", "--device", "cpu", "--only", "B7"])
    with pytest.raises(SystemExit):
        program.main()
    assert "--only names B7: there are B1, B2, B3, B4" in capsys.readouterr().err


def test_make_gpu_bench_runs_it() -> None:
    assert "-m benchmarks.gpu_bench" in Path("Makefile").read_text().split("\ngpu-bench:")[1].split("\n\n")[0]


@pytest.mark.exhaustive
def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("the quick brown fox, the quick brown fox, the\n")
    command = [sys.executable, "-m", "benchmarks.gpu_bench", "--device", "cpu", "--dtype", "float32", "--model", str(model)]
    command += ["--prompts", str(prompts), "--rows", "1,4", "--concurrency", "1,2", "--max-tokens", "8", "--repeats", "1"]
    command += ["--set", "verifier.kv_cache_tokens=2048", "--set", "verifier.max_model_len=256", "--out", str(out)]
    command += ["--set", "verifier.budget=fixed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads((out / "gpu_bench.json").read_text())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # Speeds of a tiny model on a CPU may be anything; that it was measured, and that nothing changed a token, is what counts.
    gates = found["gates"]
    assert all(gates[f"B{part}"]["result"] == "pass" for part in (1, 2, 3, 4)), done.stdout
    assert [gates[f"V{limit}"]["result"] for limit in (1, 2, 3, 4, 5)] == ["not measured"] * 4 + ["pass"]
    assert gates["V3"]["figures"]["value"] > 0 and gates["V3"]["follows"] == "this verdict is for GPUs"
    assert gates["V2"]["follows"] == "--rows lacks 64"
    assert gates["B2"]["figures"]["exact"] and gates["B3"]["figures"]["linears"] == "torch"
    assert "token for token" in gates["V5"]["found"]
    page = (out / "gpu_bench.md").read_text()
    assert page.startswith("# How fast this GPU is with Outrider") and "verdicts on speed are for GPUs" in page
    assert "| autoregressive |" in page and "| hf |" in page and "| rows | exact, ms | fast, ms | exact / fast |" in page
