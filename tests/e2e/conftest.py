"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from tests.e2e.command_line import run_here

Command = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def outrider_here(capfd: pytest.CaptureFixture[str]) -> Command:
    """``outrider`` with these arguments in this very process, so that torch is not loaded once more: exit code and output."""

    def run(*arguments: str) -> CompletedProcess[str]:
        capfd.readouterr()
        code = run_here(*arguments)
        out, err = capfd.readouterr()
        return CompletedProcess(arguments, code, out, err)

    return run
