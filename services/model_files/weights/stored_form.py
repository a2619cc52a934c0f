"""How a model's files store its weights, in words for users."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import BLOCKS_FILE
from services.model_files.weights.quantised.method import format_of

# Safetensors' names of types, as torch and users call them.
_CALLED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def stored_form(folder: Path) -> str:
    """The quantised format of the model in ``folder``, or the types of its matrices, that of most numbers first.

    Of a GGUF file, the types are those that its weights have once they are unpacked: blocks that cannot be kept are floats.

    Raises:
        ConfigurationError: a file is missing or damaged; names it.
    """
    if (quantised := format_of(folder)) is not None:
        return quantised.name
    numbers: Counter[str] = Counter()
    with WeightFiles(folder) as files:
        for name in files.names:
            if len(shape := files.shape(name)) > 1:
                kind = files.kind(name)
                numbers[_CALLED.get(kind, kind)] += math.prod(shape)
    kinds = ", ".join(kind for kind, _ in numbers.most_common())
    return f"GGUF, {kinds}" if (folder / BLOCKS_FILE).is_file() else kinds
