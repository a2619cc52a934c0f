"""Targets of larger sizes: a few layers of the size's shapes with random weights, whose passes are measured.

All layers of such a model are alike, so that a few tell what many cost. The shapes are those to which ``benchmarks.inflate``
makes the default model grow: the same text at that cost.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.inflate import Size
from services.machine.processor import free_memory
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
from speculation.errors import ConfigurationError

# Width, MLP's width and layers, by billions of parameters. Heads are as many of the default model's as fit.
SIZES: dict[str, tuple[int, int, int]] = {
    "0.5": (1152, 3072, 30),
    "1": (1728, 4608, 30),
    "3": (2880, 7680, 32),
    "7": (4032, 14336, 32),
}
# Numbers of rows that are measured; between them lines are drawn.
ROWS = (1, 2, 4, 8, 16, 32, 64)
# One more than the deepest drafter needs: streams run through a target's last six. More than a processor's cache holds.
LAYERS = 7
# As of an inflated model's added layers.
_SPREAD = 0.02
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Folders of one size's model, cut to a few layers.

    Attributes:
        folders: ``one``, with one layer, and ``several``, with ``LAYERS``.
        layers: of the whole model.
    """

    folders: dict[str, Path]
    shape: Size
    layers: int


def read_sizes(text: str) -> tuple[str, ...]:
    """The sizes of ``--sizes``, ascending.

    Raises:
        ConfigurationError: there is no such size, or it is named twice.
    """
    names = [part.strip() for part in text.split(",")]
    if not all(name in SIZES for name in names) or len(set(names)) < len(names):
        allowed = f"different ones of {', '.join(SIZES)}, comma-separated"
        raise ConfigurationError(field="--sizes", value=text or "empty", allowed=allowed)
    return tuple(sorted(names, key=float))


def own_shape(model: Path) -> tuple[Size, int]:
    """The default model's shape, and its number of layers.

    Raises:
        ConfigurationError: it is not a Llama model, of which larger ones could be made.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigurationError(field="--model", value=config.get("model_type"), allowed="a Llama model without biases")
    shape = Size.of(config)
    return shape, shape.layers


def numbers_of(model: Path, width: int, intermediate: int, layers: int) -> int:
    """Parameters of a model of these dimensions with the default model's vocabulary."""
    return _ends(model, width) + layers * _per_layer(own_shape(model)[0].filled(width, intermediate, layers))


def _ends(model: Path, width: int) -> int:
    """Numbers of embedding and output layer."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return (1 if config.get("tie_word_embeddings") else 2) * int(config["vocab_size"]) * width


def _per_layer(shape: Size) -> int:
    return sum(math.prod(each) for each in shape.shapes().values())


def write_stack(model: Path, folder: Path, width: int, intermediate: int, layers: int) -> Stack:
    """Write the size's model, bfloat16, cut to one layer and to ``LAYERS``.

    Args:
        model: folder of the default model, whose vocabulary, norms and tokeniser it has.

    Raises:
        ConfigurationError: it does not fit into the memory that is free.
    """
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    shape, vocabulary = own_shape(model)[0].filled(width, intermediate, layers), int(config["vocab_size"])
    # Drafters hold layers in float32.
    needed, free = 4 * (_ends(model, width) + LAYERS * _per_layer(shape)), free_memory()
    if needed > free:
        raise ConfigurationError(
            "leave it out",
            field="--sizes",
            value=f"{numbers_of(model, width, intermediate, layers) / 1e9:.2g}",
            given=f"which takes {needed / 2**30:.1f} GiB of memory here, of which {free / 2**30:.1f} are free",
        )
    config |= {
        "hidden_size": width, "intermediate_size": intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size, "dtype": "bfloat16",
    }  # fmt: skip
    config.pop("quantization_config", None)
    generator = torch.Generator().manual_seed(1)
    weights = {"model.embed_tokens.weight": _drawn((vocabulary, width), generator), "model.norm.weight": _ones(width)}
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = _drawn((vocabulary, width), generator)
    layer = {name: _ones(width) if len(each) == 1 else _drawn(each, generator) for name, each in shape.shapes().items()}
    folders = {"one": folder / "one", "several": folder / "several"}
    for name, count in (("one", 1), ("several", LAYERS)):
        _write(folders[name], model, config | {"num_hidden_layers": count}, weights, [layer] * count)
    return Stack(folders=folders, shape=shape, layers=layers)


def _write(
    folder: Path, model: Path, config: Mapping[str, Any], ends: Mapping[str, torch.Tensor], layers: Sequence[Any]
) -> None:
    folder.mkdir(parents=True)
    parts = {"ends": dict(ends)} | {
        f"layer-{number}": {f"model.layers.{number}.{name}": each for name, each in layer.items()}
        for number, layer in enumerate(layers)
    }
    index: dict[str, str] = {}
    for name, tensors in parts.items():
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in _TOKENIZER:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * _SPREAD).bfloat16()


def _ones(width: int) -> torch.Tensor:
    return torch.ones(width, dtype=torch.bfloat16)


def measure_passes(configs: Mapping[str, TargetConfig], context: int, repeats: int) -> dict[str, dict[int, float]]:
    """Median seconds of a pass by its rows, {target: {rows: s}}; the targets take turns.

    Args:
        context: committed tokens before the rows.
    """
    targets = {name: TransformersTarget(config) for name, config in configs.items()}
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in targets}
    try:
        for target in targets.values():
            target.open("pass", context + max(ROWS) + 1)
        # The first round warms up.
        for turn in range(repeats + 1):
            for rows in ROWS:
                for name, target in targets.items():
                    seconds = _pass(target, context, rows)
                    if turn:
                        times[name][rows].append(seconds)
    finally:
        for target in targets.values():
            target.shutdown()
    return {name: {rows: statistics.median(of) for rows, of in by_rows.items()} for name, by_rows in times.items()}


def _pass(target: TransformersTarget, context: int, rows: int) -> float:
    chain = tuple(range(-1, rows - 2))
    start = time.perf_counter()
    target.begin([Rows(request_id="pass", context=context, tokens=(1,) * rows, parents=chain, logits=rows)])
    target.end_pass()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter() - start


def target_of(folder: Path, like: TargetConfig, context: int) -> TargetConfig:
    """A target whose weights stay in bfloat16, as a larger model's would to fit into memory; else as ``like``."""
    return replace(
        like,
        model_path=str(folder),
        weights="as_stored",
        # Whole blocks of 64.
        kv_cache_tokens=context + max(ROWS) + 128,
        max_model_len=context + max(ROWS) + 1,
        enable_prefix_caching=False,
    )
