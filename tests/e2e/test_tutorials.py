"""The commands of the tutorials, in their order, with a tiny model in the place of the reader's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.command_line import ONE_THREAD, SMALL
from tests.e2e.conftest import Command
from tests.running.documented_commands import documented_commands
from training.recipe import load_recipe

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
# What waits for Ctrl-C, needs a cluster or a server, or takes an hour; that these commands exist is tested elsewhere.
_LEFT_OUT = ("serve", "bench", "top", "chat", "train", "replay")
_CONFIG = """
model: ./my-model
verifier:
  max_num_seqs: 8
  kv_cache_tokens: 8192
router:
  strategy: blend
"""


@pytest.fixture
def workplace(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder: a model, a corpus, a configuration."""
    shutil.copytree(tiny_model, tmp_path / "my-model")
    (tmp_path / "corpus").mkdir()
    for number in range(6):
        (tmp_path / f"corpus/{number}.txt").write_text(f"def __init__(self, x{number}): the quick brown fox jumps\n" * 3)
    (tmp_path / "outrider.yaml").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_configuration_is_the_page_s() -> None:
    assert _CONFIG.strip() in (TUTORIALS / "own-model.md").read_text()


@pytest.mark.parametrize(("page", "least"), [("own-model", 3), ("own-index", 3), ("own-cluster", 2)])
def test_a_tutorial_runs(page: str, least: int, workplace: Path, outrider_here: Command) -> None:
    done = []
    for words in documented_commands(TUTORIALS / f"{page}.md"):
        if words[0] in _LEFT_OUT or "--manifests" in words:
            continue
        if page == "own-cluster" and words[0] == "plan":
            words = [*words, "--model", "./my-model"]
        if words[0] == "generate":
            words = [*words, *SMALL]
        finished = outrider_here(*words)
        assert finished.returncode == 0, f"{words}: {finished.stderr}"
        if words[0] == "new-key":
            (workplace / "keys.yaml").write_text(finished.stdout)
        done.append(words[0])
    assert len(done) >= least


def test_the_tutorial_of_a_drafter_runs(workplace: Path, outrider_here: Command) -> None:
    """With answers, vocabulary, steps and trees as small as the model."""
    questions = [json.dumps({"question": f"what is {n} + {n}?"}) for n in range(60)]
    (workplace / "my-prompts.jsonl").write_text("\n".join(questions))
    recipe = load_recipe("fspad", batch_rows=1500, micro_rows=800, evaluate_every=2).model_dump(mode="json")
    (workplace / "fspad.yaml").write_text(json.dumps(recipe))
    smaller = {
        "data": ["--max-new-tokens", "48", "--samples", "2", *ONE_THREAD],
        "vocabulary": ["--size", "200"],
        "run": ["--steps", "2"],
        "evaluate": ["--trees", "4", "--positions", "2"],
        "export": [],
        "canary": ["--length", "64"],
        "tau": ["--trees", "4"],
    }
    done = []
    for words in documented_commands(TUTORIALS / "own-drafter.md"):
        if words[0] == "serve":
            assert words[1:] == ["--model", "./my-model", "--set", "drafter.models=[./my-drafter]"]
            continue
        words = ["fspad.yaml" if word == "fspad" else word for word in words]
        finished = outrider_here(*words, *smaller[words[1]])
        # After two steps a head has learnt so little that a canary may refuse it.
        learnt_nothing = words[1] == "canary" and "tokens of its own text" in " ".join(finished.stderr.split())
        assert finished.returncode == 0 or learnt_nothing, f"{words}: {finished.stderr}"
        done.append(words[1])
    assert done == list(smaller)


def test_what_users_of_other_servers_are_told_exists(workplace: Path, outrider_here: Command) -> None:
    """The command that takes the place of theirs would start, and every setting of the table is one."""
    page = TUTORIALS / "from-vllm-or-sglang.md"
    commands = [each for each in documented_commands(page) if each[0] == "serve"]
    assert len(commands) == 2
    for words in commands:
        assert words[:3] == ["serve", "--model", "Qwen/Qwen3-0.6B"]
        finished = outrider_here("plan", "--model", "./my-model", *words[3:])
        assert finished.returncode == 0, finished.stderr
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", page.read_text()))
    known = set(re.findall(r"^\| `([a-z_.]+)` ", (TUTORIALS.parent / "configuration.md").read_text(), re.MULTILINE))
    assert len(named) > 12 and named - known == set()
