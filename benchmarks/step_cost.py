"""The cost of a forward pass by its number of rows, compared with transformers' own modules.

    python -m benchmarks.step_cost [--model FOLDER] [--rows 1,8,16] [--context 256] [--device cuda --dtype bfloat16] [--json]

It needs only torch and transformers, so that it can be copied to any machine with a GPU (benchmarks.inflate makes a model of
a fitting size). Rows are a chain of drafted tokens after --context committed ones. The floor is the time to read the weights
and the keys and values once, at the speed at which this machine sums up memory. --json prints one object; its
milliseconds_by_rows, {rows: median}, is Outrider's, and exact says whether its rows have the same bits whatever they share a
pass with. On a GPU transformers then runs under what keeps its products exact, too (no split sums): for its own speed, give
--kernels torch --attention-backend torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cluster.models.target import BUILT_IN, as_float32, resolve
from services.machine.processor import cache_folder
from services.verifier.attention.calls import MAX_NODES
from services.verifier.config import AttentionBackend, Kernels, TargetConfig, Weights
from services.verifier.loading.memory import arithmetic_dtype
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from services.whole_number import whole_number

Pass = Callable[[int], None]
_MOST_ROWS = 512


def ours(target: TransformersTarget, context: int) -> Pass:
    """A pass through Outrider's target."""
    target.open("cost", context + _MOST_ROWS + 1)

    def run(rows: int) -> None:
        # More rows than a tree may have are a prompt chunk, which needs the logits of its last row only.
        tree = rows <= MAX_NODES
        parents = tuple(range(-1, rows - 2)) if tree else ()
        logits = rows if tree else 1
        target.begin([Rows(request_id="cost", context=context, tokens=(1,) * rows, parents=parents, logits=logits)])
        # On a GPU logits stay where they are, as in decoding.
        target.end_pass()

    return run


def theirs(config: TargetConfig, context: int) -> Pass:
    """A pass through transformers' modules and cache."""
    # Without further packages transformers has neither int8 nor fp8; it runs in the type of our arithmetic instead.
    dtype = arithmetic_dtype(config)
    plain = as_float32(Path(config.model_path))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype).to(config.device).eval()
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def run(rows: int) -> None:
        tokens = torch.ones(1, rows, dtype=torch.long, device=config.device)
        model(tokens, past_key_values=cache, logits_to_keep=rows if rows <= MAX_NODES else 1)
        cache.crop(-rows)

    with torch.inference_mode():
        model(torch.ones(1, context, dtype=torch.long, device=config.device), past_key_values=cache)
    return run


def measure(passes: dict[str, Pass], rows: list[int], repeats: int, device: str) -> dict[str, dict[int, float]]:
    """Median milliseconds, {contestant: {rows: ms}}; the contestants take turns."""
    times: dict[str, dict[int, list[float]]] = {name: {count: [] for count in rows} for name in passes}
    for repeat in range(repeats + 1):
        for count in rows:
            for name, run in passes.items():
                _wait(device)
                start = time.perf_counter()
                run(count)
                _wait(device)
                # The first repeat warms up.
                if repeat:
                    times[name][count].append(1e3 * (time.perf_counter() - start))
    return {name: {count: statistics.median(of) for count, of in by_rows.items()} for name, by_rows in times.items()}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def floor(config: TargetConfig, context: int) -> float:
    """Milliseconds to read all weights, and the keys and values of ``context`` tokens."""
    shape = shape_of(config)
    cached = shape.cache(config) * context / config.cache_tokens
    memory = torch.ones(2**28, dtype=torch.float32, device=config.device)
    times = []
    # On a GPU many at once: one takes no longer than the host needs to launch it and to wait.
    together = 20 if config.device.startswith("cuda") else 1
    for _ in range(7):
        _wait(config.device)
        start = time.perf_counter()
        for _ in range(together):
            memory.sum()
        _wait(config.device)
        times.append((time.perf_counter() - start) / together)
    return 1e3 * statistics.median(times) * (shape.read_per_pass(config) + cached) / (4 * len(memory))


def show(results: dict[str, dict[int, float]], context: int, floor_ms: float) -> None:
    """Print a plain table: rich may not be installed."""
    rows = list(results["outrider"])
    print(f"milliseconds per pass, behind {context} tokens")
    print("rows".ljust(16) + "".join(f"{count:>9}" for count in rows))
    for name, by_rows in results.items():
        print(name.ljust(16) + "".join(f"{by_rows[count]:>9.1f}" for count in rows))
    first = results["outrider"][rows[0]]
    print("floor".ljust(16) + f"{floor_ms:>9.1f}")
    print(f"cost / cost({rows[0]})".ljust(16) + "".join(f"{results['outrider'][count] / first:>9.2f}" for count in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN, help="folder of a model; default: the built-in one")
    parser.add_argument(
        "--rows", default="1,2,4,8,16,32,64,128,256", help="comma-separated, at most 512; beyond 128 a prompt's"
    )
    parser.add_argument("--context", type=int, default=256, help="committed tokens before the rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8", "fp8"))
    parser.add_argument("--kernels", default="auto", choices=get_args(Kernels), help="as verifier.kernels")
    parser.add_argument(
        "--attention-backend", default="auto", choices=get_args(AttentionBackend), help="as verifier.attention_backend"
    )
    parser.add_argument("--weights", default="auto", choices=get_args(Weights), help="as verifier.weights")
    parser.add_argument("--threads", type=int, help="of torch; default: every core")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = [whole_number(count, 1, _MOST_ROWS) or 0 for count in arguments.rows.split(",")]
    if not all(rows):
        parser.error(f"--rows is {arguments.rows}: must be numbers from 1 to {_MOST_ROWS}, comma-separated")
    if arguments.context < 1 or arguments.repeats < 1:
        parser.error("--context and --repeats must be at least 1")
    model = resolve(arguments.model, cache_folder(), say=lambda text: print(text, file=sys.stderr))
    config = TargetConfig(
        model_path=str(model.path),
        dtype=arguments.dtype,
        device=arguments.device,
        kv_cache_tokens=arguments.context + _MOST_ROWS + 1,
        threads=arguments.threads,
        kernels=arguments.kernels,
        attention_backend=arguments.attention_backend,
        weights=arguments.weights,
    )
    target = TransformersTarget(config)
    passes = {"outrider": ours(target, arguments.context), "transformers": theirs(config, arguments.context)}
    results = measure(passes, rows, arguments.repeats, arguments.device)
    floor_ms = floor(config, arguments.context)
    if arguments.json:
        about = {
            "model": arguments.model,
            "device": arguments.device,
            "dtype": arguments.dtype,
            "context": arguments.context,
            "exact": target.exact,
            "linears": target.kernels.linears,
            "floor_milliseconds": floor_ms,
        }
        print(json.dumps({"milliseconds_by_rows": results["outrider"], "transformers": results["transformers"], **about}))
    else:
        show(results, arguments.context, floor_ms)


if __name__ == "__main__":
    main()
