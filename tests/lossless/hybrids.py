"""Tiny models whose layers have states, one of each family that is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lossless.architectures import make

# By what their layers with a state compute.
FAMILIES = {
    "short convolution": "lfm2",
    "Mamba": "jamba",
    "Mamba-2": "bamba",
    "gated delta rule": "qwen3_next",
    "gated delta rule, decays of keys": "kimi_linear",
    "Mamba, heads": "zamba",
    "lightning attention": "minimax",
    "gated linear unit": "recurrent_gemma",
    "RWKV": "rwkv",
}
# Others whose states decay by what our steps share.
DECAYING = ("jamba", "bamba", "kimi_linear", "zamba", "minimax", "recurrent_gemma")
# The first of them shows what states need of the rest; the others are for `make test-all`.
KINDS = [
    pytest.param(kind, marks=[pytest.mark.exhaustive] if number else []) for number, kind in enumerate(FAMILIES.values())
]


def make_hybrid(model_type: str, folder: Path) -> Path:
    """Write a tiny model of the type, with a tokeniser, to ``folder``, a new one."""
    folder.mkdir()
    assert make(model_type, folder) is not None
    return folder
