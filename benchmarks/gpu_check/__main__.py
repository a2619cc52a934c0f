"""The first checks on a GPU: ten gates in under nine minutes, on a machine with torch, Triton and transformers alone.

    python -m benchmarks.gpu_check [--out FOLDER] [--only G3,G4] [--layers 32] [--seconds 520] [--least-rows 64]

G1 ceilings, G2 linear layers, G3 how the chip adds, G4 attention, G5 a whole model's bits, G6 the cost of a pass, G7
captured passes, G8 plain decoding in a loop, G9 draws, G10 layers with a state. Writes gpu_check.json and gpu_check.md,
after each gate. Exits with 0 if no gate failed, with 1 if one did, and with 2 if nothing could be checked. With --device
cpu all of it runs over a tiny model in Triton's interpreter, and says nothing of a GPU: products are numpy's there, and
nothing is judged by its speed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

# As ``forbid_split_sums`` sets them, which G2 calls: cuBLASLt reads them when CUDA starts, before G2.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")

from benchmarks.gpu_check.needs import unmet

if __name__ == "__main__":
    if lacking := unmet():
        print(f"gpu-check: {lacking}", file=sys.stderr)
        sys.exit(2)
    # Triton decides when it is imported.
    if "cpu" in sys.argv:
        os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from benchmarks.gpu_check import gpu
from benchmarks.gpu_check.attention_gate import attention
from benchmarks.gpu_check.bare_model import BareModel
from benchmarks.gpu_check.captured_gate import captured_passes
from benchmarks.gpu_check.ceilings import ceilings, how_it_adds
from benchmarks.gpu_check.decoding_gate import decoding
from benchmarks.gpu_check.drawing_gate import drawing
from benchmarks.gpu_check.layer_gate import linear_layers, routes_of, shapes_of
from benchmarks.gpu_check.model_gates import same_bits, step_costs
from benchmarks.gpu_check.sizes import CheckSizes, sizes_on
from benchmarks.gpu_check.state_gate import recurrences
from benchmarks.gpu_check.verdicts import GateVerdict, GpuGate, as_object, gates_named, page, run_gates
from services.verifier.kernels.triton.row_steps import TritonSteps

# Bandwidth where G1 was left out, TB/s: an H100's.
_TERABYTES = 3.35


def gates_of(sizes: CheckSizes, device: str, least_rows: int) -> list[GpuGate]:
    """All gates, in their order; ``least_rows``: of a product of tiles."""
    measured: dict[str, float] = {}
    make = functools.partial(BareModel, vocabulary=sizes.vocabulary, dtype=sizes.dtype, device=device, least_rows=least_rows)

    @functools.cache
    def model() -> BareModel:
        return make(sizes.model, lengths=sizes.lengths)

    def with_head_norms() -> BareModel:
        return make(sizes.few_layers, lengths=[sizes.lengths[-1]] * 2, head_norms=True)

    def first() -> GateVerdict:
        verdict = ceilings(device, sizes.copied, sizes.side)
        measured["terabytes"] = verdict.figures["terabytes_per_second"]
        return _of_speed(verdict, device)

    def layers() -> GateVerdict:
        routes = functools.partial(routes_of, least_rows=least_rows)
        shapes = shapes_of(sizes.model, sizes.vocabulary)
        return linear_layers(shapes, device, sizes.compared, sizes.timed, routes_of=routes)

    def costs() -> GateVerdict:
        return _of_speed(step_costs(model(), measured.get("terabytes", _TERABYTES), sizes.passes), device)

    def states() -> GateVerdict:
        return recurrences(device, TritonSteps(), **sizes.stepped)

    return [
        GpuGate(name="G1", asks="two ceilings", run=first, seconds=10),
        GpuGate(name="G2", asks="linear layers", run=layers, seconds=60),
        GpuGate(name="G3", asks="how the chip adds", run=lambda: how_it_adds(device, least_rows=least_rows), seconds=20),
        GpuGate(
            name="G4", asks="attention's bits", seconds=60,
            run=lambda: attention(device, least_rows=least_rows, **sizes.attended),
        ),
        GpuGate(
            name="G5", asks="a model's bits", seconds=90,
            run=lambda: same_bits({"Llama": model(), "norms of heads": with_head_norms()}, **sizes.text),
        ),
        GpuGate(name="G6", asks="the cost of a pass", run=costs, seconds=90),
        GpuGate(name="G7", asks="captured passes", run=lambda: captured_passes(model(), **sizes.text), seconds=60),
        GpuGate(name="G8", asks="decoding in a loop", run=lambda: decoding(model(), **sizes.decoded), seconds=60),
        GpuGate(name="G9", asks="draws", run=lambda: drawing(device, **sizes.drawn), seconds=20),
        GpuGate(name="G10", asks="layers with a state", run=states, seconds=60),
    ]  # fmt: skip


def _of_speed(verdict: GateVerdict, device: str) -> GateVerdict:
    """A verdict on speed, which a CPU's is none."""
    return replace(verdict, result="not measured", follows=gpu.ON_A_CPU) if device == "cpu" else verdict


def write(folder: Path, about: Mapping[str, Any], gates: Sequence[GpuGate], verdicts: Mapping[str, GateVerdict]) -> None:
    """The JSON file and the page, after each gate, so that what was found stays if a later one ends the program."""
    (folder / "gpu_check.json").write_text(json.dumps(as_object(about, verdicts), indent=1) + "\n")
    (folder / "gpu_check.md").write_text(page(about, gates, verdicts))


def main(given: Sequence[str] | None = None) -> int:
    """See the module. Returns the exit code. ``given``: the arguments; None: those of the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="folder to write to")
    parser.add_argument("--only", help="gates to run, comma-separated; default: all")
    parser.add_argument("--layers", type=int, default=32, help="of the model; 32: eight billion parameters")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--least-rows", type=int, default=16, choices=(16, 64),
        help="of a product of tiles; 64: a way out where G3 finds that small and large products disagree",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=520, help="in all; a gate for which less is left than it may take is not run"
    )
    arguments = parser.parse_args(given)
    device: str = arguments.device
    try:
        gates = gates_named(gates_of(sizes_on(device, arguments.layers), device, arguments.least_rows), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.layers < 1:
        parser.error(f"--layers is {arguments.layers}: must be at least 1")
    reason = "" if device == "cpu" else gpu.missing()
    if device != "cpu" and not reason and shutil.which(os.environ.get("CC", "cc")) is None and shutil.which("gcc") is None:
        reason = "no C compiler: Triton needs one (cc or gcc) to launch its kernels"
    if reason:
        print(f"gpu-check: {reason}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    keep = functools.partial(write, arguments.out, {**gpu.about(device), "least rows": arguments.least_rows}, gates)
    with torch.inference_mode():
        verdicts = run_gates(
            gates,
            arguments.seconds,
            say=lambda line: print(line, flush=True),
            keep=keep,
            works=functools.partial(gpu.works, device),
        )
    print(f"{arguments.out / 'gpu_check.md'} and gpu_check.json are written")
    return 0 if all(verdict.result in ("pass", "not measured") for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
