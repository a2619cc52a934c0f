"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from cli.main import main

Command = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def outrider_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``outrider`` with these arguments in this very process, so that torch is not loaded once more: exit code and output."""

    def run(*arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return CompletedProcess(sys.argv, int(ended.value.code or 0), out, err)

    return run
