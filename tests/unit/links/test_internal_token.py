"""Where the token between components comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.settings.config import load
from cluster.settings.recognition import with_token
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


def test_from_the_environment_a_file_or_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    named = load(environ={"OUTRIDER_INTERNAL_TOKEN": "a token of sixteen"})
    assert with_token(named).internal_token == "a token of sixteen"
    file = tmp_path / "token"
    file.write_text("another token of sixteen\n")
    assert with_token(load(flags=[f"internal_token_file={file}"], environ={})).internal_token == "another token of sixteen"
    first, second = (with_token(load(environ={})).internal_token for _ in range(2))
    assert first is not None
    assert len(first) >= 32
    assert first != second


def test_it_stays_the_same_on_one_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "that of Ray")
    first, second = (with_token(load(environ={})).internal_token for _ in range(2))
    assert first == second != "that of Ray"
    assert with_token(load(flags=["cluster.name=other"], environ={})).internal_token != first


def test_what_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="--set", value="internal_token"):
        load(flags=["internal_token=a token of sixteen"], environ={})
    with refuses(ConfigurationError, field="internal_token", value="hidden"):
        load(environ={"OUTRIDER_INTERNAL_TOKEN": "too short"})
    with refuses(ConfigurationError, field="--set", value="retrieval.redis_password"):
        load(flags=["retrieval.redis_password=x"], environ={})
    with refuses(ConfigurationError, field="retrieval.redis_password", value="set"):
        load(environ={"OUTRIDER_RETRIEVAL__REDIS_PASSWORD": "x"}).retrieval.check_place()
    (tmp_path / "short").write_text("short")
    for environ, field in (
        ({"OUTRIDER_INTERNAL_TOKEN_FILE": str(tmp_path / "none")}, tmp_path / "none"),
        ({"OUTRIDER_INTERNAL_TOKEN_FILE": str(tmp_path / "short")}, "internal_token_file"),
        (
            {"OUTRIDER_INTERNAL_TOKEN_FILE": "x", "OUTRIDER_INTERNAL_TOKEN": "a token of sixteen"},
            "internal_token and internal_token_file",
        ),
    ):
        with refuses(ConfigurationError, field):
            with_token(load(environ=environ))


def test_settings_given_as_a_mapping_go_before_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("verifier: {max_num_seqs: 3, max_waiting: 4}\nmodel: file\n")
    given = {"verifier": {"max_num_seqs": 5}}
    settings = load(file, environ={"OUTRIDER_VERIFIER__MAX_NUM_SEQS": "7", "OUTRIDER_MODEL": "environment"}, over=given)
    assert (settings.verifier.max_num_seqs, settings.verifier.max_waiting, settings.model) == (5, 4, "environment")
    with refuses(ConfigurationError, field="verifier.nonsense"):
        load(environ={}, over={"verifier": {"nonsense": 1}})
