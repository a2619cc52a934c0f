"""The parts of the benchmark, which measure the cost of a pass, and tokens per second. ``speed_limits`` judges that.

Each is one of our programs in a process of its own. Passes by torch's own kernels need that: what keeps cuBLASLt exact holds
for a whole process (``forbid_split_sums``), and would slow torch's own products as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench.contestants import PEERS, PLAIN
from benchmarks.gpu_check.verdicts import GateVerdict

OURS = "blend"
# The fast mode: what torch computes with where nobody asks for exact bits.
_FAST = ("--kernels", "torch", "--attention-backend", "torch")
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
    """benchmarks.step_cost: our passes, and the floor."""
    return shown_passes(_step_cost(plan))


def cost_of_fast_passes(plan: SpeedPlan) -> GateVerdict:
    """The same passes by torch's own layers and attention, and transformers'."""
    return shown_fast_passes(_step_cost(plan, *_FAST))


def _step_cost(plan: SpeedPlan, *further: str) -> dict[str, Any]:
    command = ["benchmarks.step_cost", "--model", str(plan.model), "--device", plan.device, "--dtype", plan.dtype]
    command += ["--rows", plan.rows, "--context", str(plan.context), "--json", *further]
    found: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    return found


def shown_passes(found: Mapping[str, Any]) -> GateVerdict:
    """What benchmarks.step_cost printed of our passes."""
    ours = found["milliseconds_by_rows"]
    first = next(iter(ours))
    kind = "exact" if found["exact"] else "not exact"
    return GateVerdict(
        result="pass",
        found=f"{first} row: {ours[first]:.2f} ms, reading the weights alone takes {found['floor_milliseconds']:.2f}; "
        f"passes are {kind} (layers by {found['linears']})",
        follows="the budget of nodes follows from this table",
        figures=dict(found),
        table=[
            ["rows", "ms", "times one row"],
            *([rows, f"{ms:.2f}", f"{ms / ours[first]:.2f}"] for rows, ms in ours.items()),
        ],
    )


def shown_fast_passes(found: Mapping[str, Any]) -> GateVerdict:
    """What it printed of passes by torch's own kernels."""
    fast, theirs = found["milliseconds_by_rows"], found["transformers"]
    first = next(iter(fast))
    return GateVerdict(
        result="pass",
        found=f"{first} row: {fast[first]:.2f} ms, transformers' own modules take {theirs[first]:.2f}",
        follows="what exact bits cost is judged by these",
        figures=dict(found),
        table=[
            ["rows", "ms", "transformers, ms"],
            *([rows, f"{ms:.2f}", f"{theirs[rows]:.2f}"] for rows, ms in fast.items()),
        ],
    )


def tokens_per_second(plan: SpeedPlan) -> GateVerdict:
    """``outrider bench``: plain decoding and blend, with transformers and, where it is installed, vLLM."""
    folder = plan.out / "bench"
    command = ["cli.main", "bench", "--model", str(plan.model), "--strategies", OURS, "--peers", "hf,vllm"]
    command += ["--prompts", plan.prompts, "--per-task", str(plan.per_task), "--max-tokens", str(plan.max_tokens)]
    command += ["--concurrency", plan.concurrency, "--repeats", str(plan.repeats), "--out", str(folder)]
    for setting in (f"verifier.device={plan.device}", f"verifier.dtype={plan.dtype}", *plan.settings):
        command += ["--set", setting]
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    try:
        _run(command)
    except RuntimeError:
        # It ends so, too, where tokens differ in float32: that is for a verdict.
        if not results.is_file() or not _differing(json.loads(results.read_text())):
            raise
    return shown_speed(json.loads(results.read_text()))


def shown_speed(results: Mapping[str, Any]) -> GateVerdict:
    """The results.json of ``outrider bench``."""
    speeds = {(one["contestant"], one["concurrency"]): one["tokens_per_second"]["median"] for one in results["summary"]}
    levels = sorted({level for _, level in speeds})
    names = list(dict.fromkeys(name for name, _ in speeds))
    table = [["tokens per second", *(f"{level} at a time" for level in levels)]]
    table += [[name, *(_figure(speeds.get((name, level))) for level in levels)] for name in names]
    said = [f"{name} {_figure(speeds.get((name, levels[0])))}" for name in (PLAIN, OURS)]
    return GateVerdict(
        result="pass",
        found=f"{', '.join(said)} tokens per second, {levels[0]} at a time",
        follows="write the table into docs/log.md",
        figures={"summary": results["summary"], "lossless": _checks(results)},
        table=table,
    )


def _checks(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How many of our strategies' answers are plain decoding's."""
    checks = results["lossless"]["checks"]
    return [one for one in checks if one["against"] == "plain" and one["contestant"] not in PEERS]


def _differing(results: Mapping[str, Any]) -> bool:
    return any(one["equal"] < one["answers"] for one in _checks(results))


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
