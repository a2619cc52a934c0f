"""What a folder with Uno's adapter says, read without torch.

The files are PEFT's, of linear layers alone; nothing in them tells the adapter from one that answers. No file says how long
a block is: the authors trained blocks of 2 to 16 rows. The noise is uniform over the tokens from 1 to before
``mask_token_id``, which is the model's, or the first one behind its tokenizer's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.drafter.heads.files.target_shape import check_tokenizer, read_target_shape
from services.model_files.folder import read_json, text_config
from services.model_files.peft_config import read_peft_config, weights_file
from services.model_files.weights.headers import read_header
from speculation.errors import ConfigurationError

_MASK, _NOISE, _UNIFORM = "mask_token_id", "noise", "uniform"
# What the authors' models call the token, where the configuration does not say its number.
_MASK_TOKEN = "<|MASK|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnoConfig:
    """Uno's adapter.

    Attributes:
        noise_below: rows of noise hold tokens from 1 to before this one.
    """

    noise_below: int


def count_numbers(folder: Path) -> int:
    """How many numbers the adapter in ``folder`` holds.

    Raises:
        ConfigurationError: it is no adapter that can be computed; names the field or the file.
    """
    read_peft_config(folder)
    return sum(math.prod(tensor.shape) for tensor in read_header(weights_file(folder)).values())


def parse_uno(folder: Path, target: Path) -> UnoConfig:
    """The configuration of the adapter in ``folder`` for the target in ``target``.

    Its own ``config.json``, if there is one, goes before the target's.

    Raises:
        ConfigurationError: it wants another noise, or tokens outside the vocabulary; names the field and what is allowed.
    """
    check_tokenizer(folder, target)
    shape = read_target_shape(target)
    own = text_config(read_json(folder / "config.json", of="adapter")) if (folder / "config.json").is_file() else {}
    for where, fields in ((folder, own), (target, shape.config)):
        if (noise := fields.get(_NOISE)) not in (None, _UNIFORM):
            raise ConfigurationError(
                place=where / "config.json", field=_NOISE, value=noise, allowed=f"{_UNIFORM}, or left out"
            )
        if (mask := fields.get(_MASK)) is not None:
            return UnoConfig(noise_below=_checked(mask, shape.vocab_size, where))
    return UnoConfig(noise_below=min(shape.vocab_size, _behind_tokens(target) or shape.vocab_size))


def _checked(mask: object, vocab_size: int, where: Path) -> int:
    if type(mask) is not int or not 2 <= mask <= vocab_size:
        raise ConfigurationError(
            place=where / "config.json",
            field=_MASK,
            value=mask,
            allowed=f"a whole number from 2 to {vocab_size}, the target's vocabulary: Uno's noise is drawn from the tokens "
            "below",
        )
    return mask


def _behind_tokens(target: Path) -> int:
    """The mask token of the target's tokenizer, or else the first number that it has no token for; 0: it is not known."""
    file = target / "tokenizer.json"
    return _behind_tokens_of(file, file.stat().st_mtime_ns) if file.is_file() else 0


@lru_cache(maxsize=8)
def _behind_tokens_of(file: Path, changed: int) -> int:
    """``changed``: when; a file of another time is another file."""
    content = read_json(file, of="tokenizer")
    added = [each for each in content.get("added_tokens") or () if isinstance(each, dict) and type(each.get("id")) is int]
    named = next((each["id"] for each in added if each.get("content") == _MASK_TOKEN), 0)
    if named > 1:
        return int(named)
    model = content.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    numbers = [each["id"] for each in added]
    if isinstance(vocabulary, Mapping):
        numbers += [number for number in vocabulary.values() if type(number) is int]
    elif isinstance(vocabulary, list):
        numbers.append(len(vocabulary) - 1)
    behind = max(numbers, default=-1) + 1
    return behind if behind > 1 else 0
