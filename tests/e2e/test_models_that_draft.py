"""Models that draft, from the command line: one that cannot be used stops the start with one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.conftest import Command
from tests.servers.service import tiny_settings
from tests.tiny_models.draft_models import draft_beside, make_broken_draft
from tests.tiny_models.trained_heads import heads_beside, make_useless_head


def arguments(command: str, model: Path, folder: Path, place: str) -> tuple[str, ...]:
    flags = [*tiny_settings(), f"model={model}", f"drafter.models=[{folder}]", f"drafter.models_in={place}"]
    return command, *(part for flag in flags for part in ("--set", flag)), "--in-process"


@pytest.mark.examples(2)
@pytest.mark.parametrize("place", ["drafter", "verifier"])
def test_one_that_cannot_be_used_stops_the_start(
    outrider_here: Command, tiny_model: Path, tmp_path: Path, place: str
) -> None:
    useless, broken = make_useless_head(tiny_model, tmp_path / "a"), make_broken_draft(tiny_model, tmp_path / "b")
    for folder, reason in (
        (useless, f"cannot use the head at {useless}: .*, which must be 5% at least: "),
        (broken, f"cannot load the draft model at {broken}: model.norm.weight holds infinite values or NaN$"),
    ):
        done = outrider_here(*arguments("serve", tiny_model, folder, place))
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        assert done.returncode == 2, done.stderr
        assert re.search(reason, lines[-1]), done.stderr
        assert lines[:-1] == ["Loading the model"]
        assert not done.stdout


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["drafter", "verifier"])
def test_they_draft_for_the_command_line(outrider_here: Command, tiny_model: Path, place: str) -> None:
    texts = set()
    for strategy in ("autoregressive", "draft_model", "blend"):
        command = arguments("generate", tiny_model, draft_beside(tiny_model), place)
        done = outrider_here(*command, "--strategy", strategy, "--max-tokens", "12", "the quick")
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    assert len(texts) == 1
    done = outrider_here(
        *arguments("generate", tiny_model, heads_beside(tiny_model)["eagle"], place), "--strategy", "fspad", "x"
    )
    assert done.returncode == 2
    assert "this server has no checkpoint of fspad" in done.stderr
