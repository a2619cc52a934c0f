"""From nothing to a drafter as a user types it, on a tiny target: data, vocabulary, training that is terminated and goes on,
evaluation, export, loading, drafting. ``make train-smoke``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.drafter.heads.canary.texts import TEXTS
from services.drafter.heads.eagle.source import FeatureSource
from services.drafter.heads.files.head_files import load_head
from services.drafter.heads.streams.files import load_streams
from tests.e2e.command_line import ONE_THREAD, run_here
from tests.e2e.conftest import Command
from training.recipe import load_recipe
from training.shards import read_shards
from training.tree_replay import passes_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600), pytest.mark.xdist_group("train")]

_STEPS = 20
# For a target of two layers.
_SMALL: dict[str, dict[str, Any]] = {
    "draft_model": {"layers": [0]},
    "streams": {"stream_layers": 1, "anchors": 0.5, "learning_rate": 0.03},
}


@pytest.fixture(scope="module")
def data(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "data"
    questions = out.parent / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"question": f"what is {n} + {n}?"}) for n in range(60)))
    made = run_here(
        "train", "data", "--prompts", str(questions), "--model", str(tiny_model), "--max-new-tokens", "48", "--samples", "2",
        "--out", str(out), *ONE_THREAD,
    )  # fmt: skip
    assert made == 0
    assert run_here("train", "vocabulary", "--data", str(out), "--size", "200") == 0
    return out


def _arguments(recipe: str, data: Path, out: Path) -> list[str]:
    # Enough predictions in a step for the loss to fall, and small enough parts for several of them.
    own: dict[str, Any] = {"batch_rows": 1500, "micro_rows": 800, "evaluate_every": 8, "learning_rate": 0.01}
    values = load_recipe(recipe, **{**own, **_SMALL.get(recipe, {})}).model_dump(mode="json")
    file = out.parent / f"{recipe}.json"
    # JSON is YAML.
    file.write_text(json.dumps(values))
    return [
        "train", "run", "--recipe", str(file), "--data", str(data), "--vocabulary", str(data), "--steps", str(_STEPS),
        "--out", str(out),
    ]  # fmt: skip


def _log(out: Path) -> list[dict[str, Any]]:
    file = out / "log.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.parametrize("recipe", ["fspad", "streams", "draft_model"])
def test_a_drafter_from_nothing(outrider_here: Command, recipe: str, data: Path, tiny_model: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = outrider_here(*_arguments(recipe, data, whole))
    assert done.returncode == 0, done.stderr
    assert f"step {_STEPS} of {_STEPS}" in done.stdout
    losses = [line["loss"] for line in _log(whole)]
    assert len(losses) == _STEPS
    assert sum(losses[9:12]) < 0.9 * sum(losses[:3])

    with _terminated_after(3, parts):
        done = outrider_here(*_arguments(recipe, data, parts))
    assert done.returncode == 0, done.stderr
    assert "run the same command to go on" in done.stdout
    stopped = len(_log(parts))
    assert 3 <= stopped < _STEPS
    done = outrider_here(*_arguments(recipe, data, parts))
    assert done.returncode == 0, done.stderr
    assert f"going on from step {stopped}" in done.stderr
    assert [line["step"] for line in _log(parts)] == list(range(1, _STEPS + 1))
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (each / (each / "latest").read_text() / file for each in (whole, parts))
        assert one.read_bytes() == other.read_bytes()

    # The data, and then the run, say whose text it is.
    done = outrider_here("train", "evaluate", str(whole), "--data", str(data), "--trees", "4", "--positions", "2")
    assert done.returncode == 0, done.stderr
    assert "questions" in done.stdout
    foreign = tmp_path / "foreign"
    shutil.copytree(data, foreign)
    manifest = json.loads((foreign / "manifest.json").read_text())
    manifest["target"]["weights_sha256"] = "f" * 64
    (foreign / "manifest.json").write_text(json.dumps(manifest))
    done = outrider_here("train", "evaluate", str(whole), "--data", str(foreign), "--model", str(tiny_model))
    assert done.returncode == 2 and "(ffffffffffff): must be of the run's target" in " ".join(done.stderr.split())
    drafter = tmp_path / "drafter"
    done = outrider_here("train", "export", str(whole), "--out", str(drafter))
    assert done.returncode == 0, done.stderr
    record = json.loads((drafter / "training.json").read_text())
    measured = record["evaluation"]["domains"]["all"]
    if recipe == "fspad":
        assert record["losses"]["step"] == list(range(1, record["steps"] + 1))
        assert record["losses"].keys() == {"step", "divergence", "states"} == {"step", *_log(whole)[0]["losses"]}
    else:
        assert record["losses"] is None
    assert record["steps"] <= _STEPS and len(measured["agreement"]) == 2
    if recipe == "fspad":
        source = FeatureSource("fspad", load_head(drafter, tiny_model), window=512)
        sequences = [each for each in read_shards(data, "validation") if each.temperature == 0][:4]
        assert all(0 < passes < 64 for passes in passes_of(source, sequences, 4))
        assert measured["tree"]["4"] >= 1.0
        _try_with_a_canary(outrider_here, drafter)
    elif recipe == "streams":
        assert load_streams(drafter, tiny_model).config.num_streams == 4
        # Drafts from the states inside the target were replayed, and some accepted.
        assert measured["tree"]["4"] > 1.0
    else:
        from transformers import AutoModelForCausalLM

        assert measured["tree"]["4"] > 1.0
        assert AutoModelForCausalLM.from_pretrained(drafter).config.num_hidden_layers == 1
        assert (drafter / "vocabulary.safetensors").is_file()


def _try_with_a_canary(outrider_here: Command, drafter: Path) -> None:
    """A head of noise has learnt nothing of its target: it is refused with what was measured, and nothing is written."""
    weights = drafter / "model.safetensors"
    noise = {
        name: torch.randn(each.shape).to(each.dtype) if each.is_floating_point() else each
        for name, each in load_file(weights).items()
    }
    save_file(noise, weights)
    done = outrider_here("train", "canary", str(drafter), "--length", "64")
    assert done.returncode == 2, done.stdout
    assert "tokens of its own text the target chose" in done.stderr.replace("\n", " ")
    assert not (drafter / TEXTS).exists()


@contextmanager
def _terminated_after(steps: int, out: Path) -> Iterator[None]:
    """Within the block, SIGTERM comes as soon as a training run has made so many steps."""
    over = threading.Event()

    def terminate() -> None:
        while not over.wait(0.01):
            if len(_log(out)) >= steps:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    # Were the run over before, it would end the tests.
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: None)
    watching = threading.Thread(target=terminate)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        signal.signal(signal.SIGTERM, earlier)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["run", "--recipe", "fspda", "--data", "x", "--vocabulary", "x", "--out", "y"],
            "recipe is fspda: must be a YAML file",
        ),
        (["run", "--recipe", "fspad", "--data", "docs", "--vocabulary", "x", "--out", "y"], "docs holds no training data"),
        (["evaluate", "docs", "--data", "docs"], "docs holds no checkpoint"),
        (["export", "docs", "--out", "y"], "docs holds no checkpoint"),
        (["export", "docs", "--out", "docs"], "--out docs: holds other things"),
    ],
)
def test_wrong_input_is_told_in_one_line(outrider_here: Command, arguments: list[str], why: str) -> None:
    done = outrider_here("train", *arguments)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
