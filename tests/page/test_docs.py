"""/docs in a real browser: paths, bodies, fields within fields, and a line that tries each."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest

from services.api.config import HttpConfig
from services.api.http.openai.protocol.chat_body import ChatBody
from services.api.http.operations import OPERATIONS
from tests.page.conftest import Open, Serve
from tests.servers.scripted_router import ScriptedRouter

pytestmark = [pytest.mark.xdist_group("page")]


def test_it_shows_every_path_and_field(open_page: Open, serve: Serve) -> None:
    url = serve(ScriptedRouter("words"), HttpConfig(port=0, metrics=True))
    page = open_page(f"{url}/docs")
    page.locator("details.path").nth(len(OPERATIONS) - 1).wait_for()
    assert page.locator("details.path").count() == len(OPERATIONS)
    chat = page.locator("#post_v1_chat_completions")
    chat.locator("summary").first.click()
    chat.locator("pre").wait_for()
    assert len(chat.locator("dl").first.locator("> dt").all()) == len(ChatBody.model_fields)
    row = chat.locator("dt", has_text=re.compile(r"^n$")).first.locator("xpath=following-sibling::dd[1]")
    assert "≥ 1, ≤ 16" in row.inner_text() and "the next choice has the next seed" in row.inner_text()
    # What a field holds, and what that holds.
    chat.locator("summary", has_text=re.compile("^Message$")).first.click()
    chat.locator("summary", has_text=re.compile("^Call$")).first.click()
    # It is drawn when it is opened.
    for name in ("tool_call_id", "CalledFunction"):
        chat.get_by_text(name).filter(visible=True).first.wait_for()
    assert "ChatCompletionChunk" in chat.inner_text() and "429" in chat.inner_text()
    line = chat.locator("pre").inner_text()
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=30, check=True).stdout
    assert shlex.split(line)[0] == "curl" and found.rstrip().endswith("data: [DONE]")
    assert json.loads(found.split("\n")[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.exhaustive
def test_a_path_can_be_linked_to_and_a_phone_can_read_it(open_page: Open, serve: Serve) -> None:
    url = serve(ScriptedRouter("words"))
    page = open_page(f"{url}/docs#post_tokenize", width=390, height=800)
    page.locator("#post_tokenize pre").wait_for()
    assert page.locator("#post_detokenize pre").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
