"""The commands of the tutorials, in their order, with a tiny model in the place of the reader's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.documented_commands import documented_commands
from tests.e2e.command_line import SMALL
from tests.e2e.conftest import Command

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
        if words[0] in ("generate", "plan") and "--model" not in words and "--config" not in words:
            words = [*words, "--model", "./my-model"]
        if words[0] == "index":
            words = [*words, "--model", "./my-model"]
        if words[0] == "generate":
            words = [*words, *SMALL]
        finished = outrider_here(*words)
        assert finished.returncode == 0, f"{words}: {finished.stderr}"
        if words[0] == "new-key":
            (workplace / "keys.yaml").write_text(finished.stdout)
        done.append(words[0])
    assert len(done) >= least
