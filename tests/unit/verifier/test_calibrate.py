"""The table of what passes cost: kept for the next start, of the very kernels that it was measured with, and not believed blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.verifier.checks import pass_costs as measure_costs
from services.verifier.checks.pass_costs import costs_of
from services.verifier.config import Kernels, TargetConfig
from services.verifier.kernels.native.library import instruction_sets, library
from services.verifier.model.target import TransformersTarget


def made(model: Path, kernels: Kernels = "auto") -> tuple[TransformersTarget, TargetConfig]:
    config = TargetConfig(model_path=str(model), kv_cache_tokens=2048, max_model_len=512, kernels=kernels)
    return TransformersTarget(config), config


# By so much that the model itself looks slow, too.
@pytest.mark.parametrize("disturbed", [100, 1e6])
def test_a_table_that_does_not_hold_any_more_is_measured_anew(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, disturbed: float
) -> None:
    target, config = made(tiny_model)
    first = costs_of(target, config, tmp_path)
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert content["measured"] == first.as_object()
    # As if something else had kept the machine busy while trees were timed.
    for rows, seconds in content["measured"]["by_rows"].items():
        # A table of passes that take hours would be none at all, and on a busy machine a pass takes milliseconds.
        content["measured"]["by_rows"][rows] = seconds if rows == "1" else min(3000.0, seconds * disturbed)
    file.write_text(json.dumps(content))
    again = costs_of(target, config, tmp_path)
    assert "measured anew" in caplog.text
    assert again.of_rows(8) < content["measured"]["by_rows"]["8"]
    assert json.loads(file.read_text())["measured"] == again.as_object()
    assert target.blocks.available == target.blocks.total


def test_the_table_of_a_slow_model_is_believed(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its measurement takes so long that no brief disturbance matters, and its passes are not repeated at each start."""
    target, config = made(tiny_model)
    first = costs_of(target, config, tmp_path)
    monkeypatch.setattr(measure_costs, "_SLOW_S", 0.0)
    monkeypatch.setattr(measure_costs, "_SURPRISE", 1.0)
    assert costs_of(target, config, tmp_path).as_object() == first.as_object()
    assert "measured anew" not in caplog.text


def test_other_kernels_have_a_table_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    names: list[Kernels] = ["onednn", *(name for name in instruction_sets() if library(name) is not None)]  # type: ignore[list-item]
    for name in names:
        costs_of(*made(tiny_model, name), tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == len(names)


def test_captured_passes_have_both_ends_of_every_stair(tiny_model: Path) -> None:
    """They are padded to buckets; beyond the largest tree a prompt's rows are timed."""
    target, config = made(tiny_model, "torch")
    target._part._graphs = target._part._captured(config)
    table = costs_of(target, config, None)
    by_rows = table.as_object()["by_rows"]
    stairs = [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257]
    assert [int(rows) for rows in by_rows] == stairs
    # Between the ends of a stair nothing is added but what was timed.
    assert min(by_rows["96"], by_rows["128"]) <= table.of_rows(100) <= max(by_rows["96"], by_rows["128"])
    assert target.blocks.available == target.blocks.total
