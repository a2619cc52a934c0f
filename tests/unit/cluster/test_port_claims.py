"""Routers that share a port find each other, and no other user of the machine can stop one from starting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.entry import port_claims
from cluster.entry.port_claims import claim_port
from speculation.errors import ConfigurationError
from tests.running.ports import free_port
from tests.running.refusals import refuses

NOBODY = 65534
others_here = pytest.mark.skipif(
    os.geteuid() != 0 or not port_claims._SOCKETS.exists(), reason="only root may act as another user, on Linux"
)

# Takes the names in its arguments; with "listening" first, as claims do; and fills its own queue with "full" first.
_TAKES = """
import os, socket, sys
user, kind, *names = sys.argv[1:]
os.setuid(int(user))
held = []
for name in names:
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind("\\0" + name)
    if kind != "silent":
        held[-1].listen(0 if kind == "full" else 100)
    if kind == "full":
        for _ in range(2):
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].setblocking(False)
            try:
                held[-1].connect("\\0" + name)
            except OSError:
                pass
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def prefix(address: str) -> str:
    return f"outrider-port/{port_claims._short(address)}/"


@contextmanager
def taken(kind: str, *names: str, user: int | None = None) -> Iterator[None]:
    """Another process has these names, perhaps one of another user."""
    command = [sys.executable, "-I", "-S", "-c", _TAKES, str(os.geteuid() if user is None else user), kind, *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"taken\n"
        yield
        process.stdin.close()


async def test_routers_of_one_service_share_and_those_of_two_do_not(address: str) -> None:
    looked: list[str] = []
    first = await claim_port(address, "ours", lambda: looked.append("first"))
    second = await claim_port(address, "ours", lambda: looked.append("second"))
    # The second one found the first: its port is not free, and need not be.
    assert looked == ["first"]
    with refuses(ConfigurationError, says="routers of another service"):
        await claim_port(address, "theirs", lambda: None)
    for claim in (first, second):
        assert claim is not None
        claim.close()
    last = await claim_port(address, "theirs", lambda: looked.append("last"))
    assert looked == ["first", "last"]
    assert last is not None
    last.close()


async def test_many_at_once_look_one_after_the_other(address: str) -> None:
    looked: list[int] = []
    claims = await asyncio.gather(*(claim_port(address, "ours", lambda: looked.append(1)) for _ in range(6)))
    assert looked == [1]
    for claim in claims:
        assert claim is not None
        claim.close()


@others_here
@pytest.mark.examples(3)
@pytest.mark.parametrize("kind", ["listening", "silent", "full"])
async def test_another_user_cannot_hold_up_a_start(address: str, kind: str) -> None:
    at = prefix(address)
    with taken(kind, f"{at}lock", f"{at}{port_claims._short('theirs')}/0123456789abcdef", user=NOBODY):
        looked: list[str] = []
        async with asyncio.timeout(port_claims._SHOWS_S + 5):
            claim = await claim_port(address, "ours", lambda: looked.append("first"))
        # What the stranger claims counts for nothing: the port itself is looked at.
        assert looked == ["first"]
        assert claim is not None
        claim.close()


@others_here
async def test_another_user_cannot_hide_a_claim_by_a_full_queue(address: str) -> None:
    first = await claim_port(address, "ours", lambda: None)
    names = [name for name in port_claims._names() if name.startswith(prefix(address))]
    knocking = (
        "import os, socket, sys\n"
        "os.setuid(int(sys.argv[2]))\n"
        "for _ in range(20000):\n"
        "    with socket.socket(socket.AF_UNIX) as each:\n"
        "        each.setblocking(False)\n"
        "        each.connect_ex('\\0' + sys.argv[1])\n"
    )
    command = [sys.executable, "-I", "-S", "-c", knocking, names[0], str(NOBODY)]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 0
    with refuses(ConfigurationError, says="routers of another service"):
        await claim_port(address, "theirs", lambda: None)
    assert first is not None
    first.close()


async def test_one_of_our_own_that_hangs_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_claims, "_PATIENCE_S", 0.2)
    with taken("listening", f"{prefix(address)}lock"), refuses(ConfigurationError, says="hangs; stop it"):
        await claim_port(address, "ours", lambda: None)


async def test_without_a_table_of_names_there_are_no_claims(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_claims, "_SOCKETS", Path("/no/such/table"))
    assert await claim_port(address, "ours", lambda: None) is None
