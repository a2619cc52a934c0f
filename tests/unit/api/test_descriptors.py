"""The limit of open files is raised to what connections may need, and a number that does not fit is refused."""

from __future__ import annotations

import resource

import pytest

from services.api.config import PublicServerConfig
from services.api.descriptors import make_room
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


def limited(monkeypatch: pytest.MonkeyPatch, now: int, most: int) -> list[tuple[int, int]]:
    """What the limits are set to from here on; nothing is really set."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    return made


@pytest.mark.parametrize(
    ("now", "most", "http", "limits"),
    [
        (1024, 4096, True, [(2560, 4096)]),
        (1024, resource.RLIM_INFINITY, False, [(1536, resource.RLIM_INFINITY)]),
        (65536, 65536, True, [(65536, 65536)]),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, True, []),
    ],
)
def test_the_limit_is_raised(
    now: int, most: int, http: bool, limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = limited(monkeypatch, now, most)
    make_room(PublicServerConfig(), http=http)
    assert made == limits


def test_connections_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1024, 1024)
    with refuses(ConfigurationError, field="server.max_connections", value=1024, allowed="at most 256"):
        make_room(PublicServerConfig(), http=True)
    with refuses(ConfigurationError, field="server.max_connections", value=1024, allowed="at most 512"):
        make_room(PublicServerConfig(), http=False)
