"""How fast a GPU is with Outrider: after ``make gpu-check`` has passed.

    python -m benchmarks.gpu_bench [--model FOLDER] [--out FOLDER] [--only B2,B3] [--concurrency 1,8,64] [--per-task 8]

B1 a model of seven billion parameters (benchmarks.inflate; some 15 GB, kept), B2 the cost of a pass up to 256 rows, B3 the
same by torch's own layers and attention (the fast mode), beside transformers, B4 tokens per second, plain and blend, with
transformers and, where it is installed, vLLM. V1 to V5 judge what they measured: bandwidth, the cost of rows, of exact bits,
the gain, equal tokens. Writes gpu_bench.json and gpu_bench.md. Exits with 1 if a part or a verdict failed, with 2 if nothing
could be measured, else with 0. On a CPU (--device cpu --dtype float32, with a small --model) all of it runs, but the figures
say nothing: verdicts on speed are for GPUs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_bench.speed_limits import verdicts_on
from benchmarks.gpu_bench.speed_parts import (
    SpeedPlan,
    cost_of_fast_passes,
    cost_of_passes,
    inflated_model,
    tokens_per_second,
)
from benchmarks.gpu_check import gpu
from benchmarks.gpu_check.verdicts import GateVerdict, GpuGate, as_object, gates_named, page, run_gates

# Room for the requests of the widest part, and for their prompts.
_SETTINGS = ("verifier.kv_cache_tokens=65536", "verifier.max_model_len=2048", "verifier.max_num_seqs=64")


def parts_of(plan: SpeedPlan) -> list[GpuGate]:
    """All parts, in their order."""
    return [
        GpuGate(name="B1", asks="a model of the size", run=lambda: inflated_model(plan.model), seconds=120),
        GpuGate(name="B2", asks="the cost of a pass", run=lambda: cost_of_passes(plan), seconds=120),
        GpuGate(name="B3", asks="by torch's own kernels", run=lambda: cost_of_fast_passes(plan), seconds=120),
        GpuGate(name="B4", asks="tokens per second", run=lambda: tokens_per_second(plan), seconds=600),
    ]


def main() -> int:
    """See the module. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="gpu_bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("build/inflated-7b"), help="folder; made if it is not there")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-bench"), help="folder to write to")
    parser.add_argument("--only", help="parts to run, comma-separated; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--concurrency", default="1,8,64", help="requests at a time")
    parser.add_argument("--prompts", default="builtin", help="as of outrider bench")
    parser.add_argument("--per-task", type=int, default=8, help="most prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="further settings of outrider, section.key=value")
    parser.add_argument("--seconds", type=float, default=3600, help="in all; a part that would take longer is not run")
    arguments = parser.parse_args()
    if arguments.device.partition(":")[0] == "cuda" and (reason := gpu.missing()):
        print(f"gpu-bench: {reason}", file=sys.stderr)
        return 2
    plan = SpeedPlan(
        model=arguments.model, device=arguments.device, dtype=arguments.dtype, rows=arguments.rows,
        concurrency=arguments.concurrency, prompts=arguments.prompts, per_task=arguments.per_task,
        max_tokens=arguments.max_tokens, repeats=arguments.repeats, settings=(*_SETTINGS, *arguments.set), out=arguments.out,
    )  # fmt: skip
    try:
        parts = gates_named(parts_of(plan), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    on_gpu = arguments.device != "cpu"
    about = gpu.about() if on_gpu else {"device": gpu.ON_A_CPU}
    about["model"] = str(arguments.model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    say = functools.partial(print, flush=True)

    def keep(found: Mapping[str, GateVerdict]) -> None:
        judged = verdicts_on(dict(found), on_gpu=on_gpu)
        both = {**found, **run_gates(judged, math.inf, lambda line: None)}
        (arguments.out / "gpu_bench.json").write_text(json.dumps(as_object(about, both), indent=1) + "\n")
        title = "How fast this GPU is with Outrider"
        (arguments.out / "gpu_bench.md").write_text(page(about, [*judged, *parts], both, title))

    # After each part, so that what was measured stays if a later one ends the program.
    found = run_gates(parts, arguments.seconds, say, keep=keep)
    found |= run_gates(verdicts_on(found, on_gpu=on_gpu), math.inf, say)
    print(f"{arguments.out / 'gpu_bench.md'} and gpu_bench.json are written")
    return 1 if any(verdict.result in ("fail", "not run") for verdict in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
