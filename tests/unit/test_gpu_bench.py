"""The benchmark for GPUs, dry: its verdicts, its page, its refusals; and all of it on a tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.gpu_bench import __main__ as program
from benchmarks.gpu_bench.speed_parts import judge_passes, judge_speed
from tests.tiny import make_tiny_model


def costs(**milliseconds: float) -> dict[str, Any]:
    own = {name.removeprefix("of_"): value for name, value in milliseconds.items()}
    return {"milliseconds_by_rows": own, "transformers": dict.fromkeys(own, 30.0), "floor_milliseconds": 4.2}


def results(plain: float, blend: float, equal: int = 6) -> dict[str, Any]:
    speeds = {("autoregressive", 1): plain, ("blend", 1): blend, ("autoregressive", 64): 900.0, ("blend", 64): 1000.0}
    speeds["hf", 1] = 30.0
    return {
        "summary": [
            {"contestant": name, "concurrency": level, "tokens_per_second": {"median": speed}}
            for (name, level), speed in speeds.items()
        ],
        "lossless": {
            "checks": [
                {"contestant": "blend", "against": "plain", "equal": equal, "answers": 6},
                {"contestant": "hf", "against": "plain", "equal": 0, "answers": 6},
            ]
        },
    }


def test_verdicts() -> None:
    good = judge_passes(costs(of_1=5.0, of_64=6.0))
    assert (
        good.result == "pass"
        and good.found == "1 row: 5.00 ms, reading the weights alone takes 4.20; 64 rows cost 1.20 times one"
    )
    assert good.table[1] == ["1", "5.00", "30.00", "1.00"]
    assert judge_passes(costs(of_1=5.0, of_64=8.0)).follows.startswith("64 rows must cost at most 1.25 of one")
    assert judge_passes(costs(of_8=5.0)).result == "pass"
    fast = judge_speed(results(200.0, 500.0))
    assert fast.result == "pass" and fast.found.startswith("blend is 2.50 times plain decoding at 1 at a time; every answer")
    assert fast.table == [
        ["tokens per second", "1 at a time", "64 at a time"],
        ["autoregressive", "200.0", "900.0"],
        ["blend", "500.0", "1000.0"],
        ["hf", "30.0", "-"],
    ]
    assert judge_speed(results(200.0, 300.0)).result == "fail"
    wrong = judge_speed(results(200.0, 500.0, equal=5))
    assert wrong.result == "fail" and wrong.found.endswith("answers that differ: {'blend': 1}")


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
    assert "--only names B7: there are B1, B2, B3" in capsys.readouterr().err


def test_make_gpu_bench_runs_it() -> None:
    assert "-m benchmarks.gpu_bench" in Path("Makefile").read_text().split("\ngpu-bench:")[1].split("\n\n")[0]


@pytest.mark.slow
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
    # Speeds of a tiny model on a CPU may be anything; that it was measured, and that nothing changed a token, is what counts.
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert all("raised" not in gate["found"] for gate in found["gates"].values()), done.stdout
    assert "token for token" in found["gates"]["B3"]["found"]
    page = (out / "gpu_bench.md").read_text()
    assert page.startswith("# How fast this GPU is with Outrider") and "| autoregressive |" in page and "| hf |" in page
