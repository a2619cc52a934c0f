"""What is loaded beside a model that serves, in the same process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.verifier.config import TargetConfig
from services.verifier.loading.load_model import load_beside, load_layers_beside, split_layers
from tests.tiny_models.quantised import ROUNDED, make_float_model, quantise


def test_torchs_default_type_is_left_alone(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages were shared out, and inputs rounded, by a model in the weights' type, which was all threads' meanwhile."""
    rounded, _ = quantise(make_float_model(tmp_path / "float"), tmp_path / "rounded", ROUNDED["w8a8_halves"])
    changes: set[torch.dtype] = set()
    change = torch.set_default_dtype

    def noting(dtype: torch.dtype) -> None:
        changes.add(dtype)
        change(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", noting)
    config = TargetConfig(model_path=str(tiny_model), dtype="bfloat16", stages=2)
    load_layers_beside(config, split_layers(config)[1])
    load_beside(TargetConfig(model_path=str(rounded), dtype="bfloat16"))
    assert changes == {torch.float32}
