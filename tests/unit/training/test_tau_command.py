"""``outrider train tau``: drafters side by side on the target's text, as a user types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.command_line import run_here
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import make_medusa, make_streams
from tests.trainings.training_data import DOMAINS, make_tiny_data


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "data"
    make_tiny_data(target, folder, sequences=12)
    return folder


def tau(data: Path, target: Path, *more: str) -> int:
    return run_here("train", "tau", "--data", str(data), "--model", str(target), *more)


def test_drafters_side_by_side(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target itself, as a draft model, is right in every place; untrained heads are hardly ever."""
    itself, heads = Path(shutil.copytree(target, tmp_path / "itself")), make_medusa(target, tmp_path / "heads")
    assert tau(data, target, str(itself), str(heads), "--trees", "1,4", "--answers", "all", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {str(itself), str(heads)}
    for domain in (*DOMAINS, "all"):
        assert found[str(itself)][domain]["greedy"]["1"] == pytest.approx(2, abs=0.1)
        assert found[str(itself)][domain]["greedy"]["4"] > 2.5
        assert 1 <= found[str(heads)][domain]["greedy"]["4"] < 2
        assert found[str(itself)][domain]["sampled"] == {}
    # Fewer answers, in a table; the data say whose they are.
    assert run_here("train", "tau", "--data", str(data), str(heads), "--trees", "4", "--most", "1") == 0
    table = capsys.readouterr().out
    assert "all: tokens per pass" in table and "heads, greedy text" in table and "sampled" not in table


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["STREAMS"], "reads the states of layer 0, but the data at DATA hold the layers -1: make data with"),
        ([], "no drafter comes along for"),
        (["STREAMS", "--trees", ""], "--trees is ''"),
        (["STREAMS", "--trees", "4,x"], "--trees 4,x: must be whole numbers"),
        (["NOWHERE"], "no such folder"),
    ],
)
def test_what_cannot_be_compared(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    streams = make_streams(target, tmp_path / "streams")
    given = [{"STREAMS": str(streams), "NOWHERE": str(tmp_path / "nowhere")}.get(each, each) for each in more]
    assert tau(data, target, *given) == 2
    assert words.replace("DATA", str(data)) in " ".join(capsys.readouterr().err.split())


def test_data_of_another_target(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_tiny_model(tmp_path / "other", num_hidden_layers=3)
    assert tau(data, other, str(other)) == 2
    assert "name that model with --model" in " ".join(capsys.readouterr().err.split())
