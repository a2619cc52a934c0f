"""The first checks on a GPU: six gates in under nine minutes, on a machine with torch, Triton and transformers alone.

    python -m benchmarks.gpu_check [--out FOLDER] [--only G3,G4] [--layers 32] [--seconds 520]

G1 ceilings, G2 linear layers, G3 how the chip adds, G4 attention, G5 a whole model's bits, G6 the cost of a pass. Writes
gpu_check.json and gpu_check.md, after each gate. Exits with 0 if every gate passed, with 1 if not, and with 2 if nothing
could be checked.
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

if __name__ == "__main__" and (lacking := unmet()):
    print(f"gpu-check: {lacking}", file=sys.stderr)
    sys.exit(2)

import torch

from benchmarks.gpu_check import gpu
from benchmarks.gpu_check.attention_gate import attention
from benchmarks.gpu_check.bare_model import BareModel
from benchmarks.gpu_check.ceilings import ceilings, how_it_adds
from benchmarks.gpu_check.layer_gate import linear_layers, shapes_of
from benchmarks.gpu_check.model_gates import same_bits, step_costs
from benchmarks.gpu_check.verdicts import GateVerdict, GpuGate, as_object, gates_named, page, run_gates
from benchmarks.inflate import Size

_VOCABULARY = 128256
_DEVICE = "cuda"
# Bandwidth where G1 was left out, TB/s: an H100's.
_TERABYTES = 3.35


def llama_8b(layers: int) -> Size:
    """The dimensions of Llama 3.1 8B, with other layers."""
    return Size(width=4096, intermediate=14336, layers=layers, heads=32, kv_heads=8, head_size=128)


def gates_of(layers: int) -> list[GpuGate]:
    """All gates, in their order."""
    size = llama_8b(layers)
    measured: dict[str, float] = {}

    @functools.cache
    def model() -> BareModel:
        return BareModel(size, _VOCABULARY, lengths=[4608, *[704] * 63], dtype=torch.bfloat16, device=_DEVICE)

    def with_head_norms() -> BareModel:
        few = replace(size, layers=min(2, size.layers))
        return BareModel(few, _VOCABULARY, lengths=[704] * 2, dtype=torch.bfloat16, device=_DEVICE, head_norms=True)

    def first() -> GateVerdict:
        verdict = ceilings(_DEVICE)
        measured["terabytes"] = verdict.figures["terabytes_per_second"]
        return verdict

    return [
        GpuGate(name="G1", asks="two ceilings", run=first, seconds=10),
        GpuGate(
            name="G2", asks="linear layers", seconds=60,
            run=lambda: linear_layers(shapes_of(size, _VOCABULARY), _DEVICE),
        ),
        GpuGate(name="G3", asks="how the chip adds", run=lambda: how_it_adds(_DEVICE), seconds=20),
        GpuGate(name="G4", asks="attention's bits", run=lambda: attention(_DEVICE), seconds=60),
        GpuGate(
            name="G5", asks="a model's bits", seconds=90,
            run=lambda: same_bits({"Llama": model(), "norms of heads": with_head_norms()}),
        ),
        GpuGate(
            name="G6", asks="the cost of a pass", seconds=90,
            run=lambda: step_costs(model(), measured.get("terabytes", _TERABYTES)),
        ),
    ]  # fmt: skip


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
    parser.add_argument(
        "--seconds", type=float, default=520, help="in all; a gate for which less is left than it may take is not run"
    )
    arguments = parser.parse_args(given)
    try:
        gates = gates_named(gates_of(arguments.layers), arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.layers < 1:
        parser.error(f"--layers is {arguments.layers}: must be at least 1")
    reason = gpu.missing()
    if not reason and shutil.which(os.environ.get("CC", "cc")) is None and shutil.which("gcc") is None:
        reason = "no C compiler: Triton needs one (cc or gcc) to launch its kernels"
    if reason:
        print(f"gpu-check: {reason}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    keep = functools.partial(write, arguments.out, gpu.about(), gates)
    with torch.inference_mode():
        verdicts = run_gates(gates, arguments.seconds, say=lambda line: print(line, flush=True), keep=keep, works=gpu.works)
    print(f"{arguments.out / 'gpu_check.md'} and gpu_check.json are written")
    return 0 if all(verdict.result == "pass" for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
