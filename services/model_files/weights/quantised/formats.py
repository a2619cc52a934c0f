"""The formats that are read, by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.model_files.weights.quantised.fields import Fields
from services.model_files.weights.quantised.fp8 import Fp8
from services.model_files.weights.quantised.packed import Format

FORMATS: Mapping[str, Callable[[Fields], Format]] = {
    "fp8": Fp8,
}
