"""Makes a small model as large as you like without changing its output: the same text at the cost of a large model.

    python -m benchmarks.inflate OUT [--model FOLDER] [--width 4032] [--intermediate 14336] [--layers 32] [--dtype bfloat16]

Added width is zeros (norms are rescaled, since they divide by the width); added heads and layers contribute zero. All
weights are read and multiplied all the same. With the defaults the built-in model grows to 7 billion parameters. The model
is written layer by layer, so no more than one layer is in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Standard deviation of the random weights of an added layer. They cost as much as real ones; their results become zero.
_RANDOM = 0.02
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The dimensions of a Llama-like model."""

    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Size:
        """Read from a model's config.json."""
        heads = config["num_attention_heads"]
        return cls(
            width=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
        )

    def grown(self, width: int, intermediate: int, layers: int) -> Size:
        """The enlarged dimensions: as many heads as fit into ``width``, with as many queries per key as before.

        Raises:
            ValueError: a dimension would shrink.
        """
        share = self.heads // self.kv_heads
        kv_heads = width // (self.head_size * share)
        for name, wanted, least in (
            ("--width", width, self.width), ("--intermediate", intermediate, self.intermediate),
            ("--layers", layers, self.layers), ("--width, in key-value heads", kv_heads, self.kv_heads),
        ):  # fmt: skip
            if wanted < least:
                raise ValueError(f"{name} is {wanted}: the model has {least}")
        return Size(
            width=width, intermediate=intermediate, layers=layers, heads=kv_heads * share, kv_heads=kv_heads,
            head_size=self.head_size,
        )  # fmt: skip

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's weights, by name."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "self_attn.q_proj.weight": (queries, self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
            "mlp.gate_proj.weight": (self.intermediate, self.width),
            "mlp.up_proj.weight": (self.intermediate, self.width),
            "mlp.down_proj.weight": (self.width, self.intermediate),
            "input_layernorm.weight": (self.width,),
            "post_attention_layernorm.weight": (self.width,),
        }


def inflate(model: Path, out: Path, *, width: int, intermediate: int, layers: int, dtype: torch.dtype) -> int:
    """Write the enlarged model to ``out``; returns its number of parameters.

    Raises:
        ValueError: the model is not a Llama model without biases, or a dimension would shrink.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"{model}: only Llama models without biases can be inflated, this is {config['model_type']}")
    old = Size.of(config)
    new = old.grown(width, intermediate, layers)
    out.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total = 0
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for number, weights in enumerate(_parts(file, old, new, tied=config.get("tie_word_embeddings", False))):
            name = f"model-{number:05}.safetensors"
            save_file({key: tensor.to(dtype).contiguous() for key, tensor in weights.items()}, out / name)
            index |= dict.fromkeys(weights, name)
            total += sum(tensor.numel() for tensor in weights.values())
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config |= {
        "hidden_size": new.width, "intermediate_size": new.intermediate, "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads, "num_key_value_heads": new.kv_heads, "head_dim": new.head_size,
        "rms_norm_eps": config["rms_norm_eps"] * old.width / new.width, "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for file_name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
                      "chat_template.jinja"):  # fmt: skip
        if (model / file_name).is_file():
            shutil.copyfile(model / file_name, out / file_name)
    return total


def _parts(file: Any, old: Size, new: Size, *, tied: bool) -> Iterator[Weights]:
    """The weights of each file."""
    # A norm divides by the root mean square over the whole width, most of which is zero now.
    rescale = math.sqrt(old.width / new.width)
    ends = {"model.embed_tokens.weight": _padded(file.get_tensor("model.embed_tokens.weight"), (None, new.width))}
    ends["model.norm.weight"] = _padded(file.get_tensor("model.norm.weight") * rescale, (new.width,))
    if not tied:
        ends["lm_head.weight"] = _padded(file.get_tensor("lm_head.weight"), (None, new.width))
    yield ends
    # The same in all added layers: each has its own memory all the same, and drawing takes longer than writing.
    drawn: Weights = {}
    for layer in range(new.layers):
        weights = {}
        for name, shape in new.shapes().items():
            full = f"model.layers.{layer}.{name}"
            if layer < old.layers:
                stored = file.get_tensor(full)
                weights[full] = _padded(stored * rescale if "layernorm" in name else stored, shape)
            elif name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                weights[full] = torch.zeros(shape)
            else:
                if name not in drawn:
                    drawn[name] = torch.randn(shape) * _RANDOM
                weights[full] = drawn[name]
        yield weights


def _padded(tensor: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Tensor:
    """Append zeros up to ``shape``; None keeps a dimension."""
    whole = torch.zeros([wanted or present for wanted, present in zip(shape, tensor.shape, strict=True)])
    whole[tuple(slice(length) for length in tensor.shape)] = tensor.float()
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--model", type=Path, help="folder of a Llama model in one safetensors file; default: the built-in one"
    )
    parser.add_argument("--width", type=int, default=4032)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        from cluster.models.target import BUILT_IN, as_float32, resolve
        from services.machine import cache_folder

        model = resolve(BUILT_IN, cache_folder(), say=lambda text: print(text, file=sys.stderr)).path
        model = as_float32(model)
    try:
        total = inflate(
            model, arguments.out, width=arguments.width, intermediate=arguments.intermediate, layers=arguments.layers,
            dtype=getattr(torch, arguments.dtype),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{total / 1e9:.2f} billion parameters in {arguments.out}")


if __name__ == "__main__":
    main()
