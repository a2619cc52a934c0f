"""Whether a model's files are whole and would fit into memory: by their headers, without torch, without reading a weight."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.build import read_model_config
from cluster.config import VerifierSettings
from speculation.errors import ConfigurationError

_GIB = 2**30
_LFS = b"version https://git-lfs"
# Longest header that the safetensors library takes.
_MOST_HEADER = 100_000_000
_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_STORED_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(kw_only=True, slots=True)
class Weights:
    """What the files hold: numbers in the model's layers and outside of them, and the bytes of most of them."""

    in_layers: int = 0
    others: int = 0
    stored: int = 1

    def add(self, header: dict[str, Any]) -> None:
        """Count a file's tensors."""
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            count = math.prod(tensor["shape"])
            self.stored = max(self.stored, _STORED_BYTES.get(tensor["dtype"], 1))
            if _LAYER.search(name):
                self.in_layers += count
            else:
                self.others += count


def check_config(folder: Path) -> dict[str, Any]:
    """A model's configuration.

    Raises:
        ConfigurationError: it cannot be read, or does not say what the model is.
    """
    content = read_model_config(folder)
    if not isinstance(content.get("model_type"), str):
        raise ConfigurationError(f"cannot load the model at {folder}: config.json names no model_type")
    return content


def check_tokenizer(folder: Path) -> None:
    """Check that what there is of the tokenizer's files can be read.

    Raises:
        ConfigurationError: one cannot.
    """
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot load the tokeniser at {folder}: {name} cannot be read ({error})") from error


def check_weights(folder: Path) -> Weights:
    """Check that the weights are all there.

    Raises:
        ConfigurationError: a file is missing, cut off, or none; names it.
    """
    usual = (folder / "model.safetensors").is_file() or (folder / "model.safetensors.index.json").is_file()
    if not usual and (others := [*folder.glob("*.safetensors")]):
        # Weights in a form of their own, such as blocks of a few bits: so many bytes as the files have.
        for file in others:
            read_header(file)
        return Weights(others=sum(file.stat().st_size for file in others))
    found = Weights()
    for file in _files(folder):
        found.add(read_header(file))
    return found


def _files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        if not single.is_file():
            raise ConfigurationError(f"cannot load the model at {folder}: no model.safetensors there")
        return [single]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"cannot load the model at {folder}: {index.name} cannot be read ({error})") from error
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ConfigurationError(
            f"cannot load the model at {folder}: {missing[0]} is missing"
            + (f", and {len(missing) - 1} more of {len(names)} files" if len(missing) > 1 else "")
        )
    return [folder / name for name in sorted(names)]


def read_header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file: eight bytes of length, then JSON.

    Raises:
        ConfigurationError: it is none, or the file does not hold what the header says.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
        if _LFS.startswith(start) and start:
            raise ConfigurationError(
                f"{file} is a pointer of git-lfs, not the weights: fetch them with `git lfs pull` in its folder"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _MOST_HEADER:
            raise ConfigurationError(f"{file} is no safetensors file")
        text = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
        expected = 8 + length + int(end)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigurationError(f"{file} is no safetensors file, or is cut off in its header") from error
    size = file.stat().st_size
    if size < expected:
        raise ConfigurationError(f"{file} has {size:,} bytes instead of {expected:,}: it is cut off; fetch it again")
    return header


def check_lengths(verifier: VerifierSettings, config: dict[str, Any]) -> None:
    """Check how long a request may get.

    Raises:
        ConfigurationError: longer than the model was made for, or than the cache.
    """
    wanted, most = verifier.max_model_len, config.get("text_config", config).get("max_position_embeddings")
    if wanted is not None and isinstance(most, int) and wanted > most:
        raise ConfigurationError(f"verifier.max_model_len is {wanted}: the model was made for at most {most} tokens")
    if wanted is not None and wanted > verifier.kv_cache_tokens:
        raise ConfigurationError(
            f"verifier.max_model_len is {wanted}: kv_cache_tokens, {verifier.kv_cache_tokens}, must not be below it"
        )


def cache_bytes(verifier: VerifierSettings, config: dict[str, Any]) -> float | None:
    """Of the key-value pool, over all stages; None where the configuration does not say."""
    text = config.get("text_config", config)
    try:
        heads = text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // heads
        row = 2 * text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * size
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    exact = verifier.dtype == "float32" or (verifier.dtype == "int8" and verifier.device == "cpu")
    return float(row * verifier.kv_cache_tokens * (4 if exact else 2))


def check_fits(verifier: VerifierSettings, config: dict[str, Any], weights: Weights, available: float, here: int) -> None:
    """Check that weights and cache can fit. What passes here may still be refused by the verifier, which counts exactly.

    Args:
        available: bytes, for the stages on this machine together.
        here: so many of the stages are on it.

    Raises:
        ConfigurationError: they cannot; says what would.
    """
    cache = cache_bytes(verifier, config)
    if cache is None:
        return
    # Weights may stay as they are stored, or become what the settings say: at least the smaller of the two.
    least = weights.in_layers / verifier.stages + weights.others
    held = least * min(_BYTES[verifier.dtype], weights.stored)
    taken, share = held + cache / verifier.stages, available / here
    if taken <= share:
        return
    room = (share - held) / (cache / verifier.stages) * verifier.kv_cache_tokens
    tokens = 1 << max(0, int(room)).bit_length() - 1 if room >= 64 else 0
    raise ConfigurationError(
        f"the model does not fit: at least {held / _GIB:.1f} GiB of weights and {cache / verifier.stages / _GIB:.1f} GiB of "
        f"cache (verifier.kv_cache_tokens: {verifier.kv_cache_tokens}) in each of {verifier.stages} stages, "
        f"{share / _GIB:.1f} GiB are free; "
        + (
            f"kv_cache_tokens: {tokens} would fit"
            if tokens
            else "use another dtype, more stages on other machines, or a smaller model"
        )
    )
