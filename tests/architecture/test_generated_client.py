"""The blocking client is what sdk/unasync.py makes of the asyncio one, so the two cannot drift apart."""

from __future__ import annotations

import inspect
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import AsyncClient, AsyncStream, Client, Stream

SDK = Path(__file__).parents[2] / "sdk"


def _check(sdk: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(sdk / "unasync.py"), "--check"], capture_output=True, text=True)


def test_the_blocking_client_is_fresh() -> None:
    done = _check(SDK)
    assert done.returncode == 0, done.stderr


def test_an_edit_of_one_client_alone_is_found(tmp_path: Path) -> None:
    (tmp_path / "outrider").mkdir()
    for file in ("unasync.py", "outrider/aio.py", "outrider/client.py"):
        shutil.copy(SDK / file, tmp_path / file)
    assert _check(tmp_path).returncode == 0
    client = tmp_path / "outrider" / "client.py"
    client.write_text(client.read_text().replace("time.sleep(delay)", "time.sleep(2 * delay)"))
    done = _check(tmp_path)
    assert done.returncode == 1
    assert "is not what unasync.py makes of aio.py" in done.stderr


def test_a_substitution_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing matches"):
        runpy.run_path(str(SDK / "unasync.py"))["blocking"]("nothing asynchronous")


@pytest.mark.parametrize(("one", "other"), [(AsyncClient, Client), (AsyncStream, Stream)])
def test_both_clients_have_the_same_methods(one: type, other: type) -> None:
    public = {name.replace("aclose", "close"): method for name, method in vars(one).items() if not name.startswith("_")}
    assert set(public) == {name for name in vars(other) if not name.startswith("_")}
    for name, method in public.items():
        assert inspect.signature(method).parameters == inspect.signature(getattr(other, name)).parameters
        assert method.__doc__ == getattr(other, name).__doc__
