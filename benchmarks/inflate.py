"""Makes a small model as large as you like without changing its output: the same text at the cost of a large model.

    python -m benchmarks.inflate OUT [--model FOLDER] [--width 4096] [--intermediate 14336] [--layers 32] [--heads 32]
        [--kv-heads 8] [--head-size 128] [--dtype bfloat16]

Added width is zeros (norms are rescaled, since they divide by the width); added heads and layers contribute zero. A wider
head has the numbers of each half at the front of its halves, so that rotary embedding turns the same pairs, by a base with
as many times the exponent. All weights are read and multiplied all the same. With the defaults the built-in model grows to
7 billion parameters, in the shape of Llama 3.1 8B but for its smaller vocabulary. The model is written layer by layer, so
no more than one layer is in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# Standard deviation of the random weights of an added layer. They cost as much as real ones; their results become zero.
_RANDOM = 0.02
Weights = dict[str, torch.Tensor]


class HeadSizes(NamedTuple):
    """Query heads, key-value heads, and the size of each."""

    heads: int
    kv_heads: int
    size: int


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

    @property
    def share(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads

    def filled(self, width: int, intermediate: int, layers: int) -> Size:
        """Enlarged: as many heads of the same size as fit into ``width``, with as many queries per key."""
        kv_heads = width // (self.head_size * self.share)
        return replace(
            self, width=width, intermediate=intermediate, layers=layers, heads=kv_heads * self.share, kv_heads=kv_heads
        )

    def check_grown(self, new: Size) -> None:
        """Check that ``new`` holds this.

        Raises:
            ValueError: a dimension would shrink.
        """
        for name, wanted, least in (
            ("--width", new.width, self.width), ("--intermediate", new.intermediate, self.intermediate),
            ("--layers", new.layers, self.layers), ("--kv-heads", new.kv_heads, self.kv_heads),
            ("--heads over --kv-heads", new.share, self.share), ("--head-size", new.head_size, self.head_size),
        ):  # fmt: skip
            if wanted < least:
                raise ValueError(f"{name} is {wanted}: the model has {least}")

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


def inflate(
    model: Path, out: Path, *, width: int, intermediate: int, layers: int, dtype: torch.dtype, heads: HeadSizes | None = None
) -> int:
    """Write the enlarged model to ``out``; returns its number of parameters.

    Args:
        heads: those of the enlarged model; None: as many of the same kind as fit into ``width``.

    Raises:
        ValueError: the model is not a Llama model without biases, or a dimension would shrink.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(f"{model}: only Llama models without biases can be inflated, this is {config['model_type']}")
    old = Size.of(config)
    new = old.filled(width, intermediate, layers)
    if heads is not None:
        new = replace(new, heads=heads.heads, kv_heads=heads.kv_heads, head_size=heads.size)
    old.check_grown(new)
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
    config |= _rotary(config, new.head_size / old.head_size)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for file_name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
                      "chat_template.jinja"):  # fmt: skip
        if (model / file_name).is_file():
            shutil.copyfile(model / file_name, out / file_name)
    return total


def _rotary(config: dict[str, Any], times: float) -> dict[str, Any]:
    """What of a configuration has the base of rotary embedding, for heads that are so many times as wide.

    Raises:
        ValueError: it has more than a base.
    """
    if times == 1:
        return {}
    given = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    if given.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise ValueError(f"rotary embedding with {given} has no wider heads: leave --head-size out")
    theta = float(given["rope_theta"]) ** times
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _heads(stored: torch.Tensor, name: str, old: Size, new: Size) -> torch.Tensor:
    """Weights of queries, keys, values or the output product, with the old heads where they are among the new ones."""
    own, share = name.split(".")[1], (1 if name.split(".")[1] in ("k_proj", "v_proj") else old.share)
    if own == "o_proj":
        stored = stored.T
    rows = stored.float().view(old.kv_heads, share, old.head_size, -1)
    wide = torch.zeros(new.kv_heads, share if share == 1 else new.share, new.head_size, rows.shape[-1])
    half, wide_half = old.head_size // 2, new.head_size // 2
    second = wide_half if own in ("q_proj", "k_proj") else half
    wide[: old.kv_heads, :share, :half] = rows[:, :, :half]
    wide[: old.kv_heads, :share, second : second + half] = rows[:, :, half:]
    if own == "q_proj":
        # Scores are divided by the root of the head's size.
        wide *= math.sqrt(new.head_size / old.head_size)
    flat = wide.flatten(0, 2)
    return flat.T if own == "o_proj" else flat


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
                if name.startswith("self_attn"):
                    stored = _heads(stored, name, old, new)
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
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        from cluster.models.target import BUILT_IN, as_float32, resolve
        from services.machine.processor import cache_folder

        model = resolve(BUILT_IN, cache_folder(), say=lambda text: print(text, file=sys.stderr)).path
        model = as_float32(model)
    try:
        total = inflate(
            model, arguments.out, width=arguments.width, intermediate=arguments.intermediate, layers=arguments.layers,
            dtype=getattr(torch, arguments.dtype), heads=HeadSizes(arguments.heads, arguments.kv_heads, arguments.head_size),
        )  # fmt: skip
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{total / 1e9:.2f} billion parameters in {arguments.out}")


if __name__ == "__main__":
    main()
