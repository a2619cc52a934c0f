"""What passes of models with states cost: a tree of 32 against a chain of 8, one row and a prompt against transformers.

    python -m lab.hybrid_passes [llama lfm2 qwen3_next granitemoehybrid mamba2] [--stored float32] [--repeats 9]

Random weights, in the widths of small published models. Everything runs on one thread and is timed by the processor's own
seconds, so that what runs beside it matters less. Each pass of ours commits its first row, which the next one steps again.

``--stored`` says how matrices are stored, and multiplied by us: bfloat16, or one of GGUF's types such as Q8_0 and Q4_1.
transformers computes in float32 with the numbers that these stand for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGMLQuantizationType, quants
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from services.model_files.weights.files import save_blocks
from services.model_files.weights.stacked_blocks import AnyWeight, StackedBlocks, any_numbers
from services.model_files.weights.stored_blocks import StoredBlocks
from services.verifier.config import TargetConfig
from services.verifier.loading.model_size import shape_of
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows

CONTEXT, PROMPT = 256, 256
_SHARED: dict[str, Any] = {"vocab_size": 16000, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 1}
_ATTENTION = {"num_attention_heads": 12, "num_key_value_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    # For comparison: no states.
    "llama": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, **_ATTENTION},
    # LFM2-350M's width, half of its layers.
    "lfm2": {
        "hidden_size": 1024, "intermediate_size": 4608, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 8, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "qwen3_next": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    },
    # Granite-4.0-H-350M's width, a third of its layers.
    "granitemoehybrid": {
        **_ATTENTION, "hidden_size": 768, "intermediate_size": 2048, "shared_intermediate_size": 2048,
        "num_hidden_layers": 12, "num_local_experts": 0, "position_embedding_type": "nope",
        "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 6,
        "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128,
    },
    # Mamba2-130M's width, half of its layers.
    "mamba2": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1,
    },
}  # fmt: skip


def milliseconds(passes: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Medians of this process's processor time. Passes take turns; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats + 1):
        for name, run in passes.items():
            start = time.process_time()
            run()
            times[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(own[1:]) for name, own in times.items()}


def drawn(count: int) -> tuple[int, ...]:
    """Tokens of all kinds, which choose experts of all kinds."""
    return tuple(torch.randint(1, _SHARED["vocab_size"], (count,)).tolist())


class Ours:
    """Passes of one request, each behind the rows that were committed."""

    def __init__(self, target: TransformersTarget) -> None:
        self._target, self._context = target, 0
        target.open("cost", CONTEXT + 300)
        self._pass(drawn(CONTEXT), (), CONTEXT)

    def _pass(self, tokens: tuple[int, ...], parents: tuple[int, ...], kept: int = 1) -> None:
        logits = len(parents) + 1
        self._target.begin([Rows(request_id="cost", context=self._context, tokens=tokens, parents=parents, logits=logits)])
        self._target.end_pass()
        self._target.keep("cost", self._context, range(kept))
        self._context += kept

    def tree(self, nodes: int) -> None:
        """Each node has two children."""
        self._pass(drawn(nodes + 1), tuple((node - 2) // 2 if node > 1 else -1 for node in range(nodes)))

    def chain(self, nodes: int) -> None:
        self._pass(drawn(nodes + 1), tuple(range(-1, nodes - 1)))

    def prompt(self) -> None:
        self._target.open("prompt", PROMPT + 1)
        self._target.begin([Rows(request_id="prompt", context=0, tokens=drawn(PROMPT), logits=1)])
        self._target.end_pass()
        self._target.close("prompt")


def in_blocks(matrix: torch.Tensor, kind: str) -> StoredBlocks:
    """[outputs, inputs] in blocks of one of GGUF's types."""
    raw = quants.quantize(matrix.numpy(), GGMLQuantizationType[kind])
    return StoredBlocks(torch.from_numpy(raw), kind, matrix.shape[1])


@torch.no_grad()
def store(model: PreTrainedModel, kind: str, folder: Path) -> None:
    """Write a model with its matrices in ``kind``, and give it the numbers that they stand for."""
    model.config.save_pretrained(folder)
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    held: dict[str, AnyWeight] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        made: AnyWeight = weight.detach()
        if name in model.all_tied_weights_keys:
            continue
        if kind == "bfloat16" and id(weight) in linear:
            made = weight.bfloat16()
        elif id(weight) in linear:
            made = in_blocks(weight.detach(), kind)
        elif ".experts." in name and kind != "bfloat16":
            made = StackedBlocks(tuple(in_blocks(one, kind) for one in weight.detach()), inputs_first=False)
        held[name] = made
        weight.copy_(any_numbers(made))
    save_blocks(held, folder)


def both(model_type: str, stored: str, folder: Path) -> tuple[TransformersTarget, PreTrainedModel, TargetConfig]:
    """Our model and transformers', of the same numbers."""
    config = CONFIG_MAPPING[model_type](**_SHARED, **SIZES[model_type])
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if stored == "float32":
        theirs.save_pretrained(folder)
    else:
        store(theirs, stored, folder)
    ours = TargetConfig(
        model_path=str(folder), kv_cache_tokens=2048, threads=1, weights="float32" if stored == "float32" else "as_stored"
    )
    return TransformersTarget(ours), theirs, ours


@torch.inference_mode()
def measure(model_type: str, stored: str, repeats: int) -> dict[str, float]:
    """Milliseconds of each pass, and what follows of them."""
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        target, theirs, config = both(model_type, stored, Path(folder))
        shape = shape_of(config)
    ours, cache = Ours(target), DynamicCache(config=theirs.config)
    named = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if model_type == "mamba2":
        named = {"cache": cache, "use_cache": True, "logits_to_keep": 1}
    theirs(torch.tensor([drawn(CONTEXT)]), **named)
    turns: dict[str, Callable[[], object]] = {
        "one row": lambda: ours.chain(0),
        "one row, transformers": lambda: theirs(torch.tensor([drawn(1)]), **named),
        "chain of 8": lambda: ours.chain(8),
        "tree of 32": lambda: ours.tree(32),
    }
    prompts: dict[str, Callable[[], object]] = {
        "prompt": ours.prompt,
        "prompt, transformers": lambda: theirs(torch.tensor([drawn(PROMPT)]), use_cache=True, logits_to_keep=1),
    }
    parameters = {"million parameters": sum(parameter.numel() for parameter in theirs.parameters()) / 1e6}
    found = milliseconds(turns, repeats) | milliseconds(prompts, max(2, repeats // 4))
    rates = {
        "one row, GB/s of weights": shape.read_per_pass(config) / found["one row"] / 1e6,
        "tree of 32, GFLOP/s of products": 33 * 2 * shape.multiplied(config) / found["tree of 32"] / 1e6,
    }
    held = {
        "KB of states, a request": shape.state_values_per_request * 4e-3,
        "KB of keys and values, a token": shape.cache_values_per_token * 4e-3,
    }
    return parameters | found | rates | held


@torch.inference_mode()
def core() -> dict[str, float]:
    """What one core does: bytes that torch sums up, and sums of products of two large matrices by torch."""
    side = 2048
    many, square = torch.ones(2**27), torch.ones(side, side)
    took = milliseconds({"sum": lambda: many.sum(), "product": lambda: square @ square}, repeats=5)
    return {"GB/s": many.nbytes / took["sum"] / 1e6, "GFLOP/s": 2 * side**3 / took["product"] / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=[*SIZES], help="of models; default: all")
    parser.add_argument("--stored", default="float32", help="how matrices are stored; default: float32")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("one core", json.dumps({name: round(value, 1) for name, value in core().items()}), flush=True)
    for model_type in arguments.types:
        found = measure(model_type, arguments.stored, arguments.repeats)
        print(model_type, arguments.stored, json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
