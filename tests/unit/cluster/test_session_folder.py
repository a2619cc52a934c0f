"""The folder of a Ray of our own lies where no other user of the machine can enter."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cluster.ray.session_folder import session_folder
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


def test_no_other_user_enters_it_though_ray_opens_it_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    with session_folder() as folder:
        # As Ray does.
        folder.mkdir()
        folder.chmod(0o777)
        found = folder.parent.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.geteuid())
        with session_folder() as another:
            assert another != folder
    assert not folder.parent.exists()


def test_logs_of_a_ray_that_failed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    made: list[Path] = []

    def fail() -> None:
        with session_folder() as folder:
            folder.mkdir()
            made.append(folder)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert made[0].exists()
    made[0].rmdir()
    made[0].parent.rmdir()


def test_folders_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, says in ((tmp_path / ("x" * 100), "sockets"), (tmp_path / "none", "cannot be written to")):
        if says == "sockets":
            wrong.mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(wrong))
        with refuses(ConfigurationError, field="RAY_TMPDIR", value=wrong, says=says), session_folder():
            pass
    assert not list((tmp_path / ("x" * 100)).iterdir())
