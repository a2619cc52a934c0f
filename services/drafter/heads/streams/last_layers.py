"""What the target's last layers are, from its config.json and the headers of its weights; read without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.drafter.heads.files.head_config import HeadConfig, TargetShape
from services.drafter.heads.files.head_fields import parse
from services.drafter.heads.files.layouts import COMPUTED, EAGLE, stripped
from services.model_files.weights.headers import read_shapes
from speculation.errors import ConfigurationError

_NORM = "norm.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class LastLayers:
    """What the target's last layers are.

    Attributes:
        config: of these layers.
        names: of each parameter, its name in the target's files.
        numbers: how many numbers they hold.
    """

    config: HeadConfig
    names: Mapping[str, str]
    numbers: int


def last_layers(folder: Path, target: TargetShape, count: int, where: str) -> LastLayers:
    """Read from the target's config.json and the headers of its weights; no weight is read.

    Args:
        where: the drafter, for errors.

    Raises:
        ConfigurationError: there are not so many layers, or they are of a kind that is not computed here.
    """
    first = target.num_layers - count
    names: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for public, shape in read_shapes(folder).items():
        short = stripped(public)
        layer, _, rest = short.removeprefix("layers.").partition(".")
        if short == _NORM:
            own = _NORM
        elif (
            short.startswith("layers.")
            and layer.isdigit()
            and first <= int(layer) < target.num_layers
            and not short.endswith(COMPUTED)
        ):
            own = f"layers.{int(layer) - first}.{rest}"
        else:
            continue
        names[own], shapes[own] = public, shape
    # A quantised target's weights are read as the numbers that they stand for.
    fields = {**target.config, "num_hidden_layers": count, "quantization_config": None}
    if isinstance(kinds := fields.get("layer_types"), list):
        fields["layer_types"] = kinds[first:]
    over = f"{where} over the last {count} layers of {folder}"
    config = parse(fields, EAGLE, shapes, target, over)
    wanted = _layer_shapes(config)
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            raise ConfigurationError(
                f"cannot load the head at {over}: the target's {names.get(name, name)} is "
                f"{list(shapes[name]) if name in shapes else 'missing'}: must be "
                f"{list(wanted[name]) if name in wanted else 'absent'}; other kinds of layers are not computed",
                about=over,
            )
    return LastLayers(config=config, names=names, numbers=sum(math.prod(each) for each in shapes.values()))


def _layer_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of Llama's layers and final norm, by the names of ``OwnLayers``."""
    layer, numbers = config.layer_shapes, range(config.num_layers)
    every = {f"layers.{number}.{name}": each for number in numbers for name, each in layer.items()}
    return {**every, _NORM: (config.hidden_size,)}
