"""Settings of ``outrider paper``: rows keep what they decide, and a folder remembers where its results were computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.papers.engine import SETTINGS
from cli.paper_command import _identity
from cli.paper_settings import check_settings, where_computed
from cluster.settings.config import load
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


@pytest.mark.parametrize("given", ["verifier.max_nodes=5", "verifier={max_nodes: 5}", "model=a", "drafter.models=[a]"])
def test_what_rows_decide_is_refused(given: str) -> None:
    with refuses(ConfigurationError, "--set", given, allowed="a setting that no row decides"):
        check_settings(["verifier.device=cuda", given], SETTINGS)


def test_every_setting_of_the_experiments_is_one() -> None:
    settings = load(flags=SETTINGS, environ={})
    assert settings.verifier.max_nodes == 128
    check_settings(["verifier.device=cuda", "verifier.dtype=bfloat16", "drafter.device=cuda"], SETTINGS)


def test_where_it_was_computed_is_known_whoever_said_it() -> None:
    usual = where_computed(load(environ={}))
    assert set(usual.values()) == {None}
    by_flag = where_computed(load(flags=["verifier.dtype=bfloat16", "drafter.device=cuda:1"], environ={}))
    named = {"OUTRIDER_VERIFIER__DTYPE": "bfloat16", "OUTRIDER_DRAFTER__DEVICE": "cuda:1"}
    assert by_flag == where_computed(load(environ=named)) == usual | {
        "verifier.dtype": "bfloat16", "drafter.device": "cuda:1"
    }  # fmt: skip


def test_a_folder_remembers_settings_without_passwords(tiny_model: Path) -> None:
    config = SimpleNamespace(
        model=SimpleNamespace(name="tiny", path=tiny_model), prompts=(), max_tokens=2, seed=1, settings=load(environ={}),
        index=None, unfiltered_index=None, other_indexes=(), ablation=(), shared=None,
    )  # fmt: skip
    given = ["verifier.threads=1", "retrieval.redis_url=redis://reader:secret@here:6379"]
    options = SimpleNamespace(prompts="builtin", quick=True, settings=given)
    bench = SimpleNamespace(config=config, checkpoints={})
    kept = _identity("blog", options, bench)["settings"]  # type: ignore[arg-type]
    assert kept == ["retrieval.redis_url=redis://reader:...@here:6379", "verifier.threads=1"]
