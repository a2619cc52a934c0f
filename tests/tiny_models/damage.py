"""Damages to a folder of weights or a GGUF file, as disks, downloads and people cause them: any, by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SINGLE, _WEIGHTS = "model.safetensors", ".safetensors"
# How likely each is, and what does it.
Damages = dict[str, tuple[int, Callable[[random.Random, Path], str]]]
# Values of every kind that JSON has, some of them beyond any sense.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 10**12, 0.5, -1e30, float("nan"), float("inf"), "", "x", "4", [], [1, "a"], {}, {"a": 1},
    "float8_e4m3fn", "bfloat16", "mamba", ["full_attention"], ["linear_attention", "full_attention"], {"rope_type": "yarn"},
)  # fmt: skip


def damage(folder: Path, seed: int) -> str:
    """Do one of them to a model's folder; says which."""
    return _one_of(DAMAGES, folder, seed)


def damage_beside(folder: Path, seed: int) -> str:
    """The same to a folder of weights that are used beside a model: a drafter's, or an adapter's."""
    return _one_of(DAMAGES_BESIDE, folder, seed)


def _one_of(damages: Damages, folder: Path, seed: int) -> str:
    rng = random.Random(seed)
    kind = rng.choices(list(damages), weights=[weight for weight, _ in damages.values()])[0]
    return f"{kind}: {damages[kind][1](rng, folder)}"


def damage_gguf(file: Path, seed: int) -> str:
    """Flip bytes in front of a GGUF file's weights, or cut it off."""
    rng = random.Random(seed)
    data = bytearray(file.read_bytes())
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        file.write_bytes(data[:at])
        return f"cut at {at}"
    end = data.find(b"tokenizer.ggml.tokens") if rng.random() < 0.5 else data.rfind(b"blk.") + 60
    places = [rng.randrange(end) for _ in range(rng.choice((1, 1, 1, 3)))]
    for at in places:
        data[at] = rng.choice((0, 1, 255, rng.randrange(256), data[at] ^ 1 << rng.randrange(8)))
    file.write_bytes(data)
    return f"bytes {places}"


def _file(rng: random.Random, folder: Path, suffix: str = "") -> Path:
    return rng.choice(sorted(file for file in folder.iterdir() if file.name.endswith(suffix)))


def _cut(rng: random.Random, folder: Path) -> str:
    file = _file(rng, folder)
    data = file.read_bytes()
    at = rng.choice((0, 1, 8, rng.randrange(len(data)), len(data) - 1))
    file.write_bytes(data[:at])
    return f"{file.name} at {at}"


def _flip(rng: random.Random, folder: Path) -> str:
    """Bytes of a text, or of a header: those of weights nobody could notice."""
    file = _file(rng, folder)
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little") if file.suffix == _WEIGHTS else len(data)
    places = [rng.randrange(end) for _ in range(rng.choice((1, 1, 4)))]
    for at in places:
        data[at] = rng.choice((0, 255, data[at] ^ 1 << rng.randrange(8), ord(rng.choice('0123456789{}[],:"tf-'))))
    file.write_bytes(data)
    return f"{file.name} {places}"


def _remove(rng: random.Random, folder: Path) -> str:
    file = _file(rng, folder)
    file.unlink()
    if rng.random() < 0.3:
        file.mkdir()
    elif rng.random() < 0.3:
        file.symlink_to(file)
    return file.name


def _swap(rng: random.Random, folder: Path) -> str:
    one, other = _file(rng, folder), _file(rng, folder)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    if rng.random() < 0.5:
        other.write_bytes(data)
    return f"{one.name} {other.name}"


def _replace(rng: random.Random, folder: Path) -> str:
    """A file by what downloads leave."""
    file = _file(rng, folder)
    content = rng.choice(
        (
            b"", b"null", b"[]", b"{}", b'"text"', b"[" * 100_000, b"<!DOCTYPE html><html>", b"\xff\xfe\x00", b"\0" * 4096,
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", b"{% for", b"{{ 1 / 0 }}",
        )
    )  # fmt: skip
    file.write_bytes(content)
    return f"{file.name} {content[:20]!r}"


def _field(rng: random.Random, folder: Path) -> str:
    """One field of a JSON file of a model: another value, another name, or none."""
    name = rng.choice(("config.json", "config.json", "config.json", "tokenizer.json", "tokenizer_config.json"))
    return _field_of(rng, folder / name)


def _any_field(rng: random.Random, folder: Path) -> str:
    """The same of any JSON file."""
    return _field_of(rng, _file(rng, folder, ".json"))


def _field_of(rng: random.Random, file: Path) -> str:
    content = json.loads(file.read_text()) or {"a": 1}
    place, path = content, []
    while True:
        keys: list[Any] = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        path.append(key)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            break
        place = inner
    how = rng.choice(("value", "value", "value", "gone", "name"))
    if how == "value":
        place[key] = rng.choice(VALUES)
    elif how == "gone" or isinstance(place, list):
        del place[key]
    else:
        place[f"{key}_"] = place.pop(key)
    file.write_text(json.dumps(content))
    return f"{file.name} {path} {how} {place.get(key) if isinstance(place, dict) else ''}"


def _added(rng: random.Random, folder: Path) -> str:
    """A field more in config.json, of those that change what is loaded."""
    content = json.loads((folder / "config.json").read_text())
    more: dict[str, Any] = rng.choice(
        (
            {"quantization_config": {"quant_method": rng.choice(("gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "hqq", 3))}},
            {
                "model_type": rng.choice(
                    ("t5", "mamba", "bert", "llava", "whisper", "foo", "gpt2", "mistral", "qwen2", "vit")
                )
            },
            {"auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}, "model_type": "foo"},
            {"auto_map": rng.choice(VALUES)},
            {"num_hidden_layers": rng.choice((1, 3, 10**9)), "layer_types": rng.choice(VALUES)},
            {
                "rope_scaling": rng.choice(
                    ({"rope_type": "longrope"}, {"rope_type": "yarn"}, {"type": "linear", "factor": 0}, 7)
                )
            },
            {"text_config": rng.choice(VALUES)},
            {"transformers_weights": rng.choice(("other.safetensors", "../x.safetensors", "x.bin"))},
            {"attention_chunk_size": 8},
            {"tie_word_embeddings": False},
            {"is_encoder_decoder": True},
            {"sliding_window": rng.choice(VALUES)},
            {"head_dim": rng.choice((8, 16, 32, 0))},
            {"eos_token_id": rng.choice(VALUES)},
        )
    )
    (folder / "config.json").write_text(json.dumps(content | more))
    return str(more)[:120]


def _tensor(rng: random.Random, folder: Path) -> str:
    """One weight."""
    return _tensor_of(rng, folder / SINGLE)


def _any_tensor(rng: random.Random, folder: Path) -> str:
    """One weight of any file."""
    return _tensor_of(rng, _file(rng, folder, _WEIGHTS))


def _tensor_of(rng: random.Random, file: Path) -> str:
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    weight = tensors[name]
    changes: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "gone": dict,
        "renamed": lambda: {f"{name}_packed": weight},
        "shorter": lambda: {name: weight[:-1].clone()},
        "turned": lambda: {name: weight.T.contiguous()},
        "flat": lambda: {name: weight.flatten()},
        "empty": lambda: {name: weight[:0].clone()},
        "number": lambda: {name: weight.sum()},
        "int32": lambda: {name: weight.int()},
        "int8": lambda: {name: weight.to(torch.int8)},
        "float8": lambda: {name: weight.to(torch.float8_e4m3fn)},
        "float16": lambda: {name: weight.half()},
        "float64": lambda: {name: weight.double()},
        "complex": lambda: {name: weight.to(torch.complex64)},
        "nan": lambda: {name: weight.index_fill(0, torch.tensor([len(weight) - 1]), float("nan"))},
        "infinite": lambda: {name: weight.index_fill(0, torch.tensor([0]), float("-inf"))},
        "bias": lambda: {name: weight, f"{name.removesuffix('weight')}bias": torch.zeros(len(weight))},
        "layer": lambda: {name: weight, "model.layers.7.mlp.up_proj.weight": torch.zeros(8, 8)},
        "head": lambda: {name: weight, "score.weight": torch.zeros(8, 8)},
    }
    how = rng.choice(sorted(changes))
    made = changes[how]()
    save_file({key: value for key, value in tensors.items() if key != name} | made, file, {"format": "pt"})
    return f"{file.name} {name} {how}"


def _index(rng: random.Random, folder: Path) -> str:
    """Weights in two files, with an index that may be wrong."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    rng.shuffle(names)
    files = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    places: dict[str, Any] = {name: file for file, held in files.items() for name in held}
    how = rng.choice(("right", "gone", "elsewhere", "nowhere", "outside", "kind", "more", "empty"))
    if how == "gone":
        del places[names[0]]
    elif how in ("elsewhere", "nowhere", "outside", "kind"):
        wrong = {"elsewhere": "b.safetensors", "nowhere": "c.safetensors", "outside": "../a.safetensors", "kind": 3}
        places[names[0]] = wrong[how]
    elif how == "more":
        places["model.layers.9.x"] = "a.safetensors"
    elif how == "empty":
        places = {}
    (folder / f"{SINGLE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return how


DAMAGES: Damages = {
    "cut": (2, _cut),
    "flip": (4, _flip),
    "remove": (1, _remove),
    "swap": (1, _swap),
    "replace": (2, _replace),
    "field": (8, _field),
    "added": (4, _added),
    "tensor": (4, _tensor),
    "index": (1, _index),
}
DAMAGES_BESIDE: Damages = {
    **{kind: DAMAGES[kind] for kind in ("cut", "flip", "remove", "swap", "replace")},
    "field": (8, _any_field),
    "tensor": (8, _any_tensor),
}
