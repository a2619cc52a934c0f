"""Tiny models whose layers have states, one of each family that is served."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.verifier.model.target import TransformersTarget
from services.verifier.model.target_port import Rows
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


def chain(name: str, context: int, tokens: Sequence[int]) -> Rows:
    """Tokens of a text behind its first ``context`` ones, with the logits after each."""
    return Rows(request_id=name, context=context, tokens=tuple(tokens), logits=len(tokens))


def random_text(target: TransformersTarget, length: int) -> list[int]:
    source = random.Random(1)
    return [source.randrange(1, target.vocab_size) for _ in range(length)]


def plainly(target: TransformersTarget, text: Sequence[int]) -> torch.Tensor:
    """Logits of plain decoding, one token a pass: [length, vocabulary]."""
    assert target.open("alone", len(text))
    made = torch.cat([target.forward([chain("alone", at, [token])])[0] for at, token in enumerate(text)])
    target.close("alone")
    return made


def close_all(target: TransformersTarget) -> None:
    """Close what a test has left open."""
    for name in [*target.blocks._owners]:
        target.close(name)
