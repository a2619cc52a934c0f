"""``outrider train`` as a user types it, on a tiny model: data, terminated and gone on with; a vocabulary; wrong input."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command_line import ONE_THREAD, outrider
from tests.e2e.conftest import Command
from tests.running.patience import PATIENCE_S
from training.data_manifest import FILE, read_data_manifest
from training.generate import UNDER_WAY
from training.shards import read_shards

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"what is {n} + {n}?"}) for n in range(60)))
    return file


def test_data_that_were_terminated_go_on(outrider_here: Command, questions: Path, tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    asked = [
        "train", "data", "--prompts", str(questions), "--model", str(tiny_model), "--max-new-tokens", "24",
        "--samples", "2", "--concurrency", "4", "--shard-sequences", "20", "--layers", "0,-1", *ONE_THREAD,
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "cli", *asked, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + PATIENCE_S
    while not ((out / FILE).exists() and read_data_manifest(out).shards) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert "of 120 sequences" in said and "the same command goes on" in said
    before = read_data_manifest(out)
    assert 1 <= len(before.shards) < 6
    assert json.loads((out / UNDER_WAY).read_text())
    done = outrider(*asked, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "120 of 120 sequences" in done.stdout
    whole = tmp_path / "whole"
    assert outrider_here(*asked, "--out", str(whole)).returncode == 0
    assert read_data_manifest(out) == read_data_manifest(whole)
    assert len(read_shards(out)) == 120
    chosen = outrider_here("train", "vocabulary", "--data", str(out), "--size", "64")
    assert chosen.returncode == 0, chosen.stderr
    assert "questions" in chosen.stdout and "64 tokens" in chosen.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["data", "--out", "x", "--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: cannot be read"),
        (["data", "--out", "x", "--prompts", "k8s/outrider/values.schema.json"], "must hold a list"),
        (["data", "--out", "x", "--layers", "last"], "--layers last: must be whole numbers"),
        (
            ["data", "--out", "x", "--layers", "0,-1", "--recipe", "eagle3"],
            "--layers says what --recipe would: must be alone",
        ),
        (["data", "--out", "x", "--recipe", "eagle4"], "recipe is eagle4: must be a YAML file"),
        # The tiny model has two layers.
        (["data", "--out", "x", "--recipe", "block"], "the recipe's state_layers are [1, 0, -2]: must be different ones"),
        (["data", "--out", "README.md"], "README.md"),
        (["data", "--out", "docs"], "--out docs: holds other things"),
        (["data", "--out", "x", "--device", "quantum"], "quantum"),
        (["vocabulary", "--data", "docs"], "docs holds no training data"),
    ],
)
def test_wrong_input_is_told_in_one_line(outrider_here: Command, arguments: list[str], why: str, tiny_model: Path) -> None:
    model = ["--model", str(tiny_model)] if arguments[0] == "data" else []
    done = outrider_here("train", *arguments, *model)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
