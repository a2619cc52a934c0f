"""Which format a checkpoint names in ``quantization_config``, if any."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.model_files.folder import read_json
from services.model_files.weights.described import Tensor
from services.model_files.weights.quantised.fields import QuantisationFields
from speculation.errors import ConfigurationError

if TYPE_CHECKING:
    from services.model_files.weights.quantised.packed import Format, Packed

_FIELD = "quantization_config"
_INSTEAD = (
    "use the checkpoint that it was made from (verifier.dtype: int8 quantises its weights when they are loaded), or a GGUF "
    "file"
)


def read_format(config: Mapping[str, Any]) -> Format | None:
    """The format that a ``config.json`` names; None: its weights are stored as numbers.

    Raises:
        ConfigurationError: the format, or what a field asks for, is not served; names the field.
    """
    text = config.get("text_config")
    for prefix, part in (("", config), ("text_config.", text if isinstance(text, Mapping) else {})):
        if given := part.get("compression_config"):
            raise ConfigurationError(
                f"an older form of {_FIELD}: {_INSTEAD}", field=f"{prefix}compression_config", value=f"{given}"[:80]
            )
        if given := part.get(_FIELD):
            return _read(QuantisationFields(given, f"{prefix}{_FIELD}"))
    return None


def format_of(folder: Path) -> Format | None:
    """The format of the model in ``folder``; None: its weights are stored as numbers.

    Raises:
        ConfigurationError: as ``read_format``, or config.json cannot be read.
    """
    file = folder / "config.json"
    return read_format(read_json(file)) if file.is_file() else None


def in_numbers(tensors: Mapping[str, Tensor], packed: Collection[Packed]) -> dict[str, Tensor]:
    """The tensors of the float model, each with the type that its numbers have once they are expanded.

    Args:
        tensors: those in the files.
        packed: the weights among them that are not stored as numbers.

    Raises:
        ValueError: there is no such weight.
    """
    made = {one.name: Tensor(dtype=one.dtype, shape=one.shape) for one in packed}
    if not made:
        raise ValueError(f"{_FIELD} in config.json describes weights, of which its files hold none")
    used = {name for one in packed for name in one.parts.values()}
    return {name: tensor for name, tensor in tensors.items() if name not in used} | made


def _read(fields: QuantisationFields) -> Format:
    # Formats compute with torch, which is loaded for these checkpoints alone.
    from services.model_files.weights.quantised.formats import FORMATS

    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise fields.refusal(
            "quant_method", " or ".join(FORMATS), f"its weights are in a format that is not read: {_INSTEAD}"
        )
    return FORMATS[method](fields)
