"""The parts of the benchmark: the cost of a pass, and tokens per second. Each is one of our programs in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import PEERS, PLAIN
from benchmarks.gpu_check.verdicts import GateVerdict

OURS = "blend"
# What the design must show: a row's cost at 64 rows, and the gain of one request.
_MOST_STAIR, _LEAST_GAIN = 1.25, 2.0
_SHOWN_LINES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedPlan:
    """What is measured.

    Attributes:
        rows: of a pass, comma-separated.
        concurrency: requests at a time, comma-separated.
        settings: further settings of the verifier.
        out: where files go.
    """

    model: Path
    device: str
    dtype: str
    rows: str = "1,2,4,8,16,32,64,128,256"
    context: int = 256
    concurrency: str = "1,8,64"
    prompts: str = "builtin"
    per_task: int = 8
    max_tokens: int = 128
    repeats: int = 3
    settings: tuple[str, ...] = ()
    out: Path


def inflated_model(model: Path) -> GateVerdict:
    """The model of seven billion parameters, made unless it is there."""
    if not (model / "config.json").is_file():
        _run(["benchmarks.inflate", str(model)])
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return GateVerdict(
        result="pass", found=f"{size / 1e9:.1f} GB of weights", follows="the parts below use it", figures={"bytes": size}
    )


def cost_of_passes(plan: SpeedPlan) -> GateVerdict:
    """benchmarks.step_cost: ours, transformers' and the floor."""
    command = ["benchmarks.step_cost", "--model", str(plan.model), "--device", plan.device, "--dtype", plan.dtype]
    command += ["--rows", plan.rows, "--context", str(plan.context), "--json"]
    made = _run(command)
    return judge_passes(json.loads(made.splitlines()[-1]))


def judge_passes(found: Mapping[str, Any]) -> GateVerdict:
    """The verdict on what benchmarks.step_cost printed."""
    ours, theirs, floor = found["milliseconds_by_rows"], found["transformers"], found["floor_milliseconds"]
    table = [["rows", "ms", "transformers, ms", "times one row"]]
    first = next(iter(ours))
    for rows, took in ours.items():
        table.append([rows, f"{took:.2f}", f"{theirs[rows]:.2f}", f"{took / ours[first]:.2f}"])
    stair = ours["64"] / ours["1"] if {"1", "64"} <= ours.keys() else None
    steep = stair is not None and stair > _MOST_STAIR
    said = f"; 64 rows cost {stair:.2f} times one" if stair is not None else ""
    return GateVerdict(
        result="fail" if steep else "pass",
        found=f"{first} row: {ours[first]:.2f} ms, reading the weights alone takes {floor:.2f}{said}",
        follows=f"64 rows must cost at most {_MOST_STAIR} of one: make gpu-check says where" if steep
        else "the budget of nodes follows from this table",
        figures=dict(found), table=table,
    )  # fmt: skip


def tokens_per_second(plan: SpeedPlan, peers: Sequence[str] = ("hf", "vllm")) -> GateVerdict:
    """``outrider bench``: plain decoding and blend, with transformers and, where it is installed, vLLM."""
    folder = plan.out / "bench"
    command = ["cli.main", "bench", "--model", str(plan.model), "--strategies", OURS, "--peers", ",".join(peers)]
    command += ["--prompts", plan.prompts, "--per-task", str(plan.per_task), "--max-tokens", str(plan.max_tokens)]
    command += ["--concurrency", plan.concurrency, "--repeats", str(plan.repeats), "--out", str(folder)]
    for setting in (f"verifier.device={plan.device}", f"verifier.dtype={plan.dtype}", *plan.settings):
        command += ["--set", setting]
    _run(command)
    return judge_speed(json.loads((folder / "results.json").read_text()))


def judge_speed(results: Mapping[str, Any]) -> GateVerdict:
    """The verdict on the results.json of ``outrider bench``."""
    speeds = {(one["contestant"], one["concurrency"]): one["tokens_per_second"]["median"] for one in results["summary"]}
    levels = sorted({level for _, level in speeds})
    names = list(dict.fromkeys(name for name, _ in speeds))
    table = [["tokens per second", *(f"{level} at a time" for level in levels)]]
    table += [[name, *(_figure(speeds.get((name, level))) for level in levels)] for name in names]
    checks = [one for one in results["lossless"]["checks"] if one["against"] == "plain" and one["contestant"] not in PEERS]
    differ = {one["contestant"]: one["answers"] - one["equal"] for one in checks if one["equal"] < one["answers"]}
    gain = speeds[OURS, levels[0]] / speeds[PLAIN, levels[0]]
    follows = [f"answers differ from plain decoding ({differ}): see make gpu-check, G5"] if differ else []
    follows += (
        [f"at {levels[0]} at a time it must be {_LEAST_GAIN}: see the page's table of passes"] if gain < _LEAST_GAIN else []
    )
    return GateVerdict(
        result="fail" if follows else "pass",
        found=f"{OURS} is {gain:.2f} times plain decoding at {levels[0]} at a time; "
        + (f"answers that differ: {differ}" if differ else "every answer is plain decoding's, token for token"),
        follows="; ".join(follows) or "write the table into docs/log.md",
        figures={"summary": results["summary"], "lossless": results["lossless"]["checks"]}, table=table,
    )  # fmt: skip


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _run(command: list[str]) -> str:
    """Run one of our modules; returns what it printed.

    Raises:
        RuntimeError: it failed; gives the end of what it said.
    """
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).strip().splitlines()[-_SHOWN_LINES:])
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {said}")
    return done.stdout
