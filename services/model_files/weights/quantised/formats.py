"""The formats that are read, by ``quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.model_files.weights.quantised.awq import Awq
from services.model_files.weights.quantised.bitsandbytes import BitsAndBytes
from services.model_files.weights.quantised.compressed_tensors import CompressedTensors
from services.model_files.weights.quantised.fields import QuantisationFields
from services.model_files.weights.quantised.fp8 import Fp8
from services.model_files.weights.quantised.gptq import Gptq
from services.model_files.weights.quantised.hqq import Hqq
from services.model_files.weights.quantised.mxfp4 import Mxfp4
from services.model_files.weights.quantised.packed import Format

FORMATS: Mapping[str, Callable[[QuantisationFields], Format]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "hqq": Hqq,
    "mxfp4": Mxfp4,
}
