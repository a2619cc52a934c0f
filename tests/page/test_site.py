"""The documentation's site in a real browser: it asks its own server alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.page.conftest import Open
from tests.running.site import build

# Pages that are open at a time. Each is waited for until it has asked for nothing for half a second.
_AT_ONCE = 4

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("page")]


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of the built site, and the names of its pages."""
    pytest.importorskip("zensical")
    folder = build(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", sorted(str(page.relative_to(folder)) for page in folder.rglob("*.html"))
    server.shutdown()
    server.server_close()


def test_no_page_asks_anyone_else(site: tuple[str, list[str]], open_page: Open) -> None:
    address, names = site
    assert len(names) > 25
    first, asked = open_page(address), list[str]()
    first.context.on("request", lambda request: asked.append(request.url))
    pages = [first, *(first.context.new_page() for _ in range(_AT_ONCE - 1))]
    for start in range(0, len(names), _AT_ONCE):
        opened = list(zip(pages, names[start : start + _AT_ONCE], strict=False))
        for page, name in opened:
            page.goto(address + name, wait_until="commit")
        for page, name in opened:
            page.wait_for_load_state("networkidle")
            if name == "concepts.html":
                images = page.locator("article img")
                assert images.count() == 4
                assert images.evaluate_all("all => all.every(each => each.naturalWidth > 0)")
    assert len(asked) > len(names)
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
