"""What tests do with the page, as a user would."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from services.api.config import HttpConfig
from services.api.http.server import HttpServer, serve_http
from services.api.messages import RouterPort
from tests.running.patience import end_thread


def ask(page: Any, message: str, **fields: str) -> None:
    """As ``send``; and wait until the answer has ended and all of it is shown."""
    send(page, message, **fields)
    page.locator(".answer .under").last.wait_for()
    page.locator(".answer.busy").wait_for(state="detached")
    # What is beside the answer is drawn some time later.
    page.evaluate("new Promise(done => { const look = () => inspector.drawn ? setTimeout(look, 5) : done(); look(); })")


def send(
    page: Any,
    message: str,
    *,
    strategy: str = "",
    effort: str = "",
    seed: str = "",
    temperature: str = "0",
    length: str = "48",
) -> None:
    """Send a message."""
    page.locator(f"#strategy option[value='{strategy}']").wait_for(state="attached")
    page.select_option("#strategy", strategy)
    page.select_option("#effort", effort)
    page.fill("#seed", seed)
    page.fill("#temperature", temperature)
    page.fill("#length", length)
    page.fill("#message", message)
    page.press("#message", "Enter")


def answer_of(page: Any, nth: int = -1) -> str:
    """The text of an answer, with its spaces."""
    return str(page.locator(".answer .text").nth(nth).evaluate("element => element.textContent"))


def kinds(page: Any, kind: str) -> list[int]:
    """Tokens of the tree's nodes of a kind, from the root on."""
    return list(
        page.locator(f"#tree g.{kind}").evaluate_all(
            "all => all.map(each => [Number(each.querySelector('rect').getAttribute('x')), Number(each.dataset.token)])"
            ".sort((a, b) => a[0] - b[0]).map(each => each[1])"
        )
    )


def saved(page: Any) -> dict[str, Any]:
    """The run that the page saves."""
    with page.expect_download() as waiting:
        page.click("#save")
    found: dict[str, Any] = json.loads(waiting.value.path().read_text())
    return found


def whole_answer(url: str, message: str, **sampling: Any) -> dict[str, Any]:
    """The same answer, not streamed and without a report."""
    body = {"messages": [{"role": "user", "content": message}], **sampling}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
    return found


@contextmanager
def scripted_service(router: RouterPort, config: HttpConfig | None = None) -> Iterator[str]:
    """The HTTP server in front of a router, in a thread of its own; yields its URL."""
    ready: Future[tuple[HttpServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        server = await serve_http(router, config or HttpConfig(port=0))
        ready.set_result((server, asyncio.get_running_loop(), stop))
        await stop.wait()
        await server.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    server, loop, stop = ready.result(60)
    try:
        yield server.url
    finally:
        end_thread(thread, loop, stop)
