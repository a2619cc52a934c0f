"""What decides a target's tokens besides the request: its weights, and how they are multiplied."""

from __future__ import annotations

import hashlib
from pathlib import Path

from services.model_files.folder import model_fingerprint
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError


def arithmetic_of(target: TransformersTarget, config: TargetConfig) -> str:
    """A short hash that differs where tokens could: by weights (``model_fingerprint``), dtype, device and kernels.

    Our own kernels for a CPU give the same bits on every instruction set, from weights in either format.
    """
    try:
        weights = model_fingerprint(Path(config.model_path))
    except ConfigurationError:
        # Targets of tests have no files.
        weights = ""
    kernels = target.kernels
    multiplied = [kernels.linears] if kernels.linears == "native" else kernels.about
    told = (weights, config.dtype, target.device.type, config.attention_backend, multiplied, target.exact)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
