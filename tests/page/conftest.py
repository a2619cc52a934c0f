"""A real Chromium for the tests of the page. Where there is none, they are skipped: `make page-browser` installs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.page.asking import scripted_service
from tests.servers.http_service import HttpService, http_served

NAMES = ("chromium", "chromium-browser", "google-chrome")


# Of a module: while Playwright runs, no other test of the process can have an event loop in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium here: `make page-browser` installs it from Debian's package, as root")
    with sync_api.sync_playwright() as playwright:
        # Chromium's sandbox needs what containers do not give, and only our own page is opened.
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def service(tiny_model: Path) -> Iterator[HttpService]:
    with http_served(tiny_model) as running:
        yield running


class Complaints(list[str]):
    """What a browser's console shows of errors.

    Attributes:
        expected: words of errors that a test provokes.
    """

    expected: str | None = None

    def check(self) -> None:
        """There are those that are expected, as they may come until the page is closed, and no others."""
        others = [each for each in self if self.expected is None or self.expected not in each]
        assert others == []
        assert self.expected is None or self, f"nothing says {self.expected!r}"


Open = Callable[..., Any]
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts the HTTP server in front of a router; gives its URL. It stops when the pages are closed.

    They look at it every two seconds. What they find while it stops is an error in their console.
    """
    with ExitStack() as running:
        yield lambda *given: running.enter_context(scripted_service(*given))


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def open_page(browser: Any, complaints: Complaints, serve: Serve) -> Iterator[Open]:
    """Opens the page at an address, in a window of its own. In the end no console may have shown an error.

    Args:
        serve: whether a test serves itself or not, so that it stops last.
    """
    contexts = []

    def opened(url: str, *, width: int = 1280, height: int = 860, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        # Of every page in it.
        context.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        context.on("weberror", lambda thrown: complaints.append(f"uncaught: {thrown.error}"))
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    complaints.check()
