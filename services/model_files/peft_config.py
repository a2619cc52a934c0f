"""Reads the ``adapter_config.json`` of a LoRA adapter in PEFT's format, without torch.

What would change the adapter's products in a way that is not computed here is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.model_files.folder import read_json
from speculation.errors import ConfigurationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256

# They say how the adapter was trained, or what for.
_HARMLESS = frozenset(
    {
        "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
        "lora_dropout", "eva_config", "fan_in_fan_out", "loftq_config", "runtime_config",
        "megatron_core", "qalora_group_size", "layers_pattern", "layers_to_transform",
    }
)  # fmt: skip
# Ways to begin that leave the base model's weights as they are.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """What a LoRA adapter is made of.

    Attributes:
        ranks, alphas: of modules whose names match; ``rank`` and ``alpha`` are those of all others.
        rank_stabilised: products are scaled by alpha / sqrt(rank), rather than alpha / rank.
        targets, excluded: names, or the ends of names, of the modules that it adapts and leaves out; or a regular
            expression of whole names. No targets: they are not told.
        layers: those that it adapts; None: all.
        ties_embeddings: a layer that shares its weight with the embedding that it adapts shares the product as well.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilised: bool
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]
    ties_embeddings: bool

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What a module's product is multiplied by."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)

    def adapts(self, module: str) -> bool:
        """Whether it adapts a module, as far as the configuration tells."""
        if not self.targets or self.targets == _ALL_LINEAR:
            return False
        if not _named(self.targets, module) or (self.excluded and _named(self.excluded, module)):
            return False
        return self.layers is None or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in self.layers_patterns] or [r".*?\.[^.]*\.(\d+)\."]
        found = (re.match(pattern, module) for pattern in patterns)
        return next((int(match[1]) for match in found if match), None)


def _by_pattern(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    """The value of the first pattern that ends a module's name, as PEFT finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def read_peft_config(folder: Path) -> PeftConfig:
    """The configuration in an adapter's folder.

    Raises:
        ConfigurationError: it cannot be read, or asks for what is not computed here; names the field.
    """
    return _Fields(folder, read_json(folder / CONFIG, of="adapter")).parsed()


def weights_file(folder: Path) -> Path:
    """The adapter's weights.

    Raises:
        ConfigurationError: they are not there.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise ConfigurationError(f"cannot load the adapter at {folder}: no {WEIGHTS} there", about=folder)
    return file


class _Fields:
    def __init__(self, folder: Path, fields: Mapping[str, Any]) -> None:
        self._folder, self._fields = folder, fields

    def parsed(self) -> PeftConfig:
        """The fields, each checked."""
        self._require("peft_type", ("LORA",))
        self._require("bias", ("none", None))
        self._require("init_lora_weights", _PLAIN_BEGINNINGS)
        rank, alpha = self._rank("r", self._get("r", 8)), self._number("lora_alpha", self._get("lora_alpha", 8))
        made = PeftConfig(
            rank=rank,
            alpha=alpha,
            ranks={key: self._rank("rank_pattern", value) for key, value in self._patterns("rank_pattern").items()},
            alphas={key: self._number("alpha_pattern", value) for key, value in self._patterns("alpha_pattern").items()},
            rank_stabilised=self._flag("use_rslora"),
            targets=self._names("target_modules"),
            excluded=self._names("exclude_modules"),
            layers=self._layers(),
            layers_patterns=self._list_of_names("layers_pattern"),
            ties_embeddings=self._flag("ensure_weight_tying"),
        )
        known = {
            "peft_type", "bias", "init_lora_weights", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora",
            "target_modules", "exclude_modules", "ensure_weight_tying",
        }  # fmt: skip
        for name, value in self._fields.items():
            if name not in known | _HARMLESS and value not in (None, False, [], {}, ""):
                raise self._refuse(name, value, "left out: it changes what is computed in a way that is not served")
        return made

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(name)
        return default if value is None else value

    def _refuse(self, name: str, value: object, allowed: str) -> ConfigurationError:
        shown = value if isinstance(value, str) else json.dumps(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ConfigurationError(
            place=f"cannot load the adapter at {self._folder}", field=name, value=shown, allowed=allowed
        )

    def _require(self, name: str, values: tuple[object, ...]) -> None:
        value = self._fields.get(name)
        if not any(value is one or (isinstance(one, str) and value == one) for one in values):
            listed = " or ".join(one if isinstance(one, str) else json.dumps(one) for one in values if one is not None)
            raise self._refuse(name, value, listed)

    def _rank(self, name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self._refuse(name, value, f"a whole number from 1 to {MAX_RANK}")
        return value

    def _number(self, name: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise self._refuse(name, value, "a number")
        return float(value)

    def _flag(self, name: str) -> bool:
        value = self._get(name, False)
        if not isinstance(value, bool):
            raise self._refuse(name, value, "true or false")
        return value

    def _patterns(self, name: str) -> Mapping[str, Any]:
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self._refuse(name, value, "an object from names of modules to numbers")
        self._check_patterns(name, value)
        return value

    def _names(self, name: str) -> tuple[str, ...] | str:
        value = self._get(name, [])
        if isinstance(value, str):
            self._check_patterns(name, (value,) if value != _ALL_LINEAR else ())
            return value
        return self._list_of_names(name)

    def _list_of_names(self, name: str) -> tuple[str, ...]:
        value = self._get(name, [])
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._refuse(name, value, "names of modules")
        return tuple(value)

    def _check_patterns(self, name: str, patterns: Iterable[str]) -> None:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, RecursionError) as error:
                raise self._refuse(name, pattern, f"a regular expression ({error})") from error

    def _layers(self) -> frozenset[int] | None:
        value = self._fields.get("layers_to_transform")
        if value is None:
            return None
        value = [value] if isinstance(value, int) else value
        if not isinstance(value, list) or any(type(one) is not int or one < 0 for one in value):
            raise self._refuse("layers_to_transform", value, "numbers of layers")
        return frozenset(value)
