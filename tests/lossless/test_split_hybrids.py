"""Models whose layers have states, a stage for each layer: the bits of one process.

What every stage has to know of its place is left out in turn, and must be seen: the kinds of its layers, what was scaled
before it, what rows were embedded as, and what their files call their weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from services.verifier.config import TargetConfig
from services.verifier.loading import decoder_parts
from services.verifier.loading.decoder_parts import DecoderParts
from services.verifier.model import embedded_rows
from services.verifier.model.embedded_rows import EmbeddedRows
from services.verifier.model.slice import ModelSlice
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.lossless.architectures import stages
from tests.lossless.hybrids import make_hybrid
from tests.running.refusals import refuses

pytestmark = pytest.mark.xdist_group("hybrids")


def config_of(folder: Path, **more: Any) -> TargetConfig:
    return TargetConfig(model_path=str(folder), kv_cache_tokens=1024, max_model_len=256, threads=1, **more)


def split(folder: Path) -> str:
    """See ``architectures.stages``."""
    config = config_of(folder)
    return stages(config, TransformersTarget(config), exact=True)


@pytest.mark.examples(2)
# Names of their own; kinds that follow from a layer's number; experts and filters that files have apart; layers that
# neither attend nor have a state. The others are in test_architectures.py.
@pytest.mark.parametrize("model_type", ["mamba2", "jamba", "kimi_linear", "nemotron_h", "zamba", "zamba2"])
def test_a_stage_for_each_layer(model_type: str, tmp_path: Path) -> None:
    assert split(make_hybrid(model_type, tmp_path / "model")) == ""


def _scaled_again(parts: DecoderParts) -> None:
    """What is handed on is multiplied as embeddings are."""


def _not_embedded(rows: EmbeddedRows, tokens: torch.Tensor) -> AbstractContextManager[None]:
    """Layers get what the stage before made in the place of embeddings."""
    return nullcontext()


def _others_embedded(rows: EmbeddedRows, tokens: torch.Tensor) -> AbstractContextManager[None]:
    """They get those of the rows before."""
    return _of(rows, tokens.roll(1, dims=1))


_of = EmbeddedRows.of


def _numbered_anew(parts: DecoderParts, layers: range) -> EmbeddedRows:
    """Layers are told their numbers in their stage."""
    return EmbeddedRows(parts, range(len(layers)))


def _of_the_first(text: PreTrainedConfig, layers: range) -> None:
    """The kinds of as many layers from the first on."""
    text.num_hidden_layers = len(layers)


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    ("model_type", "where", "name", "fault"),
    [
        ("granitemoehybrid", DecoderParts, "_leave_scale", _scaled_again),
        ("olmo_hybrid", decoder_parts, "_keep_kinds", _of_the_first),
        ("zamba", EmbeddedRows, "of", _not_embedded),
        ("zamba", EmbeddedRows, "of", _others_embedded),
        ("zamba2", embedded_rows, "EmbeddedRows", _numbered_anew),
    ],
)
def test_planted_faults_are_seen_here(
    model_type: str, where: Any, name: str, fault: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_hybrid(model_type, tmp_path / "model")
    assert split(folder) == ""
    monkeypatch.setattr(where, name, fault)
    try:
        found = split(folder)
    except AssertionError as error:
        found = str(error)
    assert found


@pytest.mark.parametrize("model_type", ["lara_mini"])
def test_what_is_not_split_says_why(model_type: str, tmp_path: Path) -> None:
    folder = make_hybrid(model_type, tmp_path / "model")
    with refuses(ConfigurationError, field="verifier.stages", value=2):
        ModelSlice(config_of(folder, stages=2), 1)
