"""What LoRA adapters cost a pass: a row with one beside a row without, and a batch whose rows have several.

    python -m lab.adapter_cost [--model FOLDER] [--rank 16] [--adapters 8] [--requests 16] [--context 256] [--repeats 40]

The adapters are random and of all linear layers but the output layer.
Passes with and without take turns; times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cluster.models.target import BUILT_IN, resolve
from services.machine.processor import cache_folder
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.low_rank_kernel import LowRank
from services.verifier.loading.peft_folder import StoredAdapter
from services.verifier.model.lora_adapters import LoraAdapters
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Prefix, Rows


def random_adapter(adapters: LoraAdapters, rank: int, seed: int, dtype: torch.dtype) -> StoredAdapter:
    """An adapter of all linear layers but the output layer, as PEFT's all-linear."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.01).to(dtype)

    products = {
        name: LowRank(down=drawn(rank, layer.inputs), up=drawn(layer.outputs, rank))
        for name, layer in adapters.layers.items()
        if ".layers." in name
    }
    return StoredAdapter(where="random", digest=f"{seed:064x}", products=products)


def batch_of(target: TransformersTarget, kind: str, names: Sequence[str], context: int) -> list[Rows]:
    """A decoding step of one request for each of ``names``, an adapter or empty."""
    batch = []
    for number, name in enumerate(names):
        request = f"{kind}/{number}"
        assert target.open(request, context + 1, Prefix(tokens=(1,), adapter=name))
        batch.append(Rows(request_id=request, context=context, tokens=(1,), logits=1))
    return batch


def milliseconds(target: TransformersTarget, batches: Sequence[Sequence[Rows]], repeats: int) -> list[float]:
    """The median time of each batch's pass."""
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(repeats + 1):
        for own, batch in zip(times, batches, strict=True):
            start = time.perf_counter()
            target.begin(batch)
            target.end_pass()
            own.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(own[1:]) for own in times]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN)
    parser.add_argument("--weights", choices=("auto", "float32", "as_stored"), default="auto")
    parser.add_argument("--adapter-dtype", choices=("float32", "bfloat16"), default="float32")
    for name, default in (("rank", 16), ("adapters", 8), ("requests", 16), ("context", 256), ("repeats", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    model = resolve(given.model, cache_folder())
    target = TransformersTarget(
        TargetConfig(
            weights=given.weights,
            model_path=str(model.path),
            kv_cache_tokens=64 * (given.context // 64 + 2) * 2 * (given.requests + 1),
            max_model_len=given.context + 64,
            kernels_dir=cache_folder() / "kernel-choices",
            # It lets adapters be added, and nothing is read from it.
            lora_folders=(Path("/"),),
        )
    )
    adapters = target._part.adapters
    assert adapters is not None
    names = [f"adapter {number}" for number in range(given.adapters)]
    for seed, name in enumerate(names):
        adapters.add(name, random_adapter(adapters, given.rank, seed, getattr(torch, given.adapter_dtype)))
    mixed = [names[number % len(names)] for number in range(given.requests)]
    given_rank = f"rank {given.rank} in {given.adapter_dtype}"
    print(f"{model.name}, {target.kernels.weights}, {torch.get_num_threads()} threads, {given_rank}")
    for rows, with_adapters in ((1, names[:1]), (given.requests, mixed)):
        batches = [
            batch_of(target, f"{kind} {rows}", own, given.context) for kind, own in enumerate(([""] * rows, with_adapters))
        ]
        plain, adapted = milliseconds(target, batches, given.repeats)
        count = len(set(with_adapters))
        print(f"{rows:3d} rows: {plain:7.2f} ms without, {adapted:7.2f} with {count} adapters: {adapted / plain - 1:+.1%}")


if __name__ == "__main__":
    main()
