"""``outrider train disco`` and ``outrider bench stopping`` as a user runs them, on tiny models: data, classifier, comparison."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cli.main import main
from cluster.models import drafters
from services.drafter.stopping.classifier import Classifier, ClassifierCard, read_classifier
from services.model_files.folder import model_fingerprint
from tests.e2e.conftest import Command
from tests.tiny_models.draft_models import make_tiny_draft
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dog",
    "prompt",
    "lookup",
    "copies",
    "what",
    "was",
    "said",
    "before",
    "and",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model that is often right."""
    folder = tmp_path_factory.mktemp("models")
    target = make_tiny_model(folder / "target", eos_token_id=None)
    return target, make_tiny_draft(target, folder / "draft")


@pytest.fixture(scope="module")
def data(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own text, as ``outrider train data`` writes it."""
    folder = tmp_path_factory.mktemp("data")
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": " ".join(WORDS[n % 16 :: 1 + n % 5] + [WORDS[n % 7]] * (1 + n // 40))} for n in range(100)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["train", "data", "--prompts", str(prompts), "--out", str(folder / "made"), "--model", str(models[0])]
    more = ["--samples", "2", "--max-new-tokens", "32", "--set", "verifier.threads=1", "--set", "verifier.budget=fixed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["outrider", *arguments, *more])
        with pytest.raises(SystemExit, match="0"):
            main()
    return folder / "made"


def test_a_classifier_is_trained_and_compared(
    outrider_here: Command, models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    target, draft = map(str, models)
    file = tmp_path / "disco.safetensors"
    made = ["train", "disco", "--data", str(data), "--draft", draft, "--model", target, "--out", str(file)]
    done = outrider_here(*made, "--longest", "16", "--steps", "100")
    assert done.returncode == 0, done.stderr
    assert "F1" in done.stdout and "c = " in done.stdout
    _, card = read_classifier(file)
    assert card.training["train_examples"] > 300 and card.training["examples"] == "chains"
    again = outrider_here(*made)
    assert again.returncode == 2 and "exists; name a new file" in again.stderr

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(("the quick brown", "prompt lookup", "over the lazy dog", "what was said")))
    out = tmp_path / "stopping.json"
    done = outrider_here(
        "bench", "stopping", "--draft", draft, "--model", target, "--classifier", str(file), "--prompts", str(prompts),
        "--max-tokens", "24", "--sweep", "3", "--repeats", "2", "--out", str(out), "--set", "verifier.threads=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Policies (c = " in done.stdout and "Lengths of drafts" in done.stdout
    found = json.loads(out.read_text())
    policies = {each["name"]: each for each in found["policies"]}
    assert found["lossless"] and {"plain", "heuristic", "confidence", "entropy", "disco", "oracle"} <= set(policies)
    assert policies["oracle"]["wasted"] == 0
    assert policies["oracle"]["target_passes"] == min(each["target_passes"] for each in policies.values())
    assert policies["plain"]["target_passes"] == policies["plain"]["tokens"] == 2 * 2 * 23


def test_another_draft_model_is_refused(
    outrider_here: Command, models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    target, draft = map(str, models)
    file = tmp_path / "disco.safetensors"
    done = outrider_here(
        "train", "disco", "--data", str(data), "--draft", draft, "--model", target, "--out", str(file),
        "--cost-ratio", "0.2", "--answers", "40", "--steps", "5", "--examples", "judged",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "c = 0.200" in done.stdout
    done = outrider_here("bench", "stopping", "--draft", target, "--model", target, "--classifier", str(file))
    assert done.returncode == 2 and "trained on another draft model" in done.stderr
    done = outrider_here("bench", "stopping", "--model", target)
    assert done.returncode == 2 and "none comes along for" in done.stderr and "--recipe draft_model" in done.stderr


def test_data_of_another_target_are_refused(
    outrider_here: Command, models: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    target, draft = map(str, models)
    done = outrider_here(
        "train", "disco", "--data", str(data), "--draft", target, "--model", draft, "--out", str(tmp_path / "x.safetensors")
    )
    assert done.returncode == 2 and "written by another target" in done.stderr


def test_a_target_that_drafts_for_itself_is_always_right(
    outrider_here: Command, models: tuple[Path, Path], tmp_path: Path
) -> None:
    target = str(models[0])
    prompts, out = tmp_path / "prompts.txt", tmp_path / "stopping.json"
    prompts.write_text("the quick brown\nprompt lookup")
    done = outrider_here(
        "bench", "stopping", "--draft", target, "--model", target, "--prompts", str(prompts), "--max-tokens", "20",
        "--sweep", "1", "--repeats", "1", "--out", str(out), "--set", "verifier.threads=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    policies = {each["name"]: each for each in json.loads(out.read_text())["policies"]}
    assert policies["plain"]["tokens"] == 19
    # Three steps of 6 tokens, and one without room for a draft.
    assert (policies["static 5"]["target_passes"], policies["static 5"]["wasted"]) == (4, 0)
    assert (policies["oracle"]["target_passes"], policies["oracle"]["draft_passes"]) == (1, 18)


def test_the_models_that_come_along_are_found(
    outrider_here: Command, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model for a target of this name, and the classifier in its folder."""
    target, draft = models
    own = tmp_path / target.name / "draft_model"
    shutil.copytree(draft, own)
    (own / "disco").mkdir()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in (("w1", (4, 13)), ("b1", 4), ("w2", 4), ("b2", 1))}
    card = ClassifierCard(draft=model_fingerprint(own), target=model_fingerprint(target), theta=0.5, max_tokens=3)
    Classifier(**zeros, mean=np.zeros(13, np.float32), std=np.ones(13, np.float32)).write(
        own / "disco" / "classifier.safetensors", card
    )
    monkeypatch.setattr(drafters, "_BUNDLED", tmp_path)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "stopping.json"
    prompts.write_text("the quick brown\nprompt lookup")
    done = outrider_here(
        "bench", "stopping", "--model", str(target), "--prompts", str(prompts), "--max-tokens", "12", "--sweep", "1",
        "--repeats", "1", "--out", str(out), "--set", "verifier.threads=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    policies = {each["name"]: each for each in json.loads(out.read_text())["policies"]}
    # As unsure of every token as theta: each draft has all that the card allows.
    assert policies["disco"]["draft_passes"] > policies["disco"]["target_passes"]
