"""The page at ``/``: what is served, under which headers, and how large it is."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from cluster.settings import component_configs
from cluster.settings.config import load
from services.access.key_records import hash_key
from services.api.config import HttpConfig, PublicServerConfig
from services.api.http.page import PAGE, content_security_policy
from services.api.http.server import serve_http
from services.router.comparisons import _replayed
from speculation.colours import COLOURS
from speculation.sources import AUTO, STRATEGIES, TARGET
from tests.servers.scripted_router import ScriptedRouter

MOST_BYTES = 62 * 1024
ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def served(config: HttpConfig | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    server = await serve_http(ScriptedRouter("words"), config or HttpConfig(port=0))
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client
    await server.stop(0)


async def test_a_browser_gets_the_page() -> None:
    async with served() as client:
        answer = await client.get("/")
        assert answer.status_code == 200 and answer.content == PAGE.read_bytes()
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["content-security-policy"] == content_security_policy(PAGE.read_bytes())
        head = await client.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(answer.content))
        assert head.headers["content-security-policy"] == answer.headers["content-security-policy"]


async def test_other_paths_and_methods_are_refused_as_ever() -> None:
    async with served() as client:
        for path in ("/index.html", "/page.html", "/favicon.ico"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), path
        answer = await client.post("/", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_supported")


async def test_a_setting_turns_it_off() -> None:
    assert (
        built := component_configs.http_config(load(flags=["server.page=false"], environ={}))
    ) is not None and not built.page
    async with served(HttpConfig(port=0, page=False)) as client:
        answer = await client.get("/")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert "there are /," not in answer.json()["error"]["message"]


async def test_the_page_is_open_and_what_it_asks_is_not() -> None:
    public = PublicServerConfig(port=0, api_key_hashes=(hash_key("k" * 20),))
    async with served(HttpConfig(port=0, public=public)) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_no_other_host_name_gets_it() -> None:
    async with served() as client:
        assert (await client.get("/", headers={"host": "evil.example"})).status_code == 403


def test_the_policy_names_the_pages_own_script_and_style_alone() -> None:
    policy = dict(part.split(" ", 1) for part in content_security_policy(PAGE.read_bytes()).split("; "))
    text = PAGE.read_text()
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in " ".join(policy.values())


def test_the_policy_changes_with_the_script() -> None:
    one, other = (content_security_policy(f"<style>a</style><script>{code}</script>".encode()) for code in ("1", "2"))
    assert one != other


def test_the_page_needs_nothing_else_and_makes_no_html_of_texts() -> None:
    text = PAGE.read_text()
    # Attributes of style and handlers of events would be against the policy; a SVG's own name space is no address.
    assert not re.search(r"<[a-z][^>]*\s(style|on[a-z]+)=", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", text)
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|localStorage|sessionStorage|document\.cookie", text)


def test_it_offers_to_compare_all_that_can_be_compared() -> None:
    (listed,) = re.findall(r"const COMPARED = \[(.*?)\];", PAGE.read_text(), re.DOTALL)
    can = {name for name, sources in STRATEGIES.items() if not sources or any(map(_replayed, sources))}
    assert set(re.findall(r'"(\w+)"', listed)) == can - {AUTO}


def test_its_colours_are_those_of_all_pictures() -> None:
    (listed,) = re.findall(r"const COLOURS = \{(.*?)\};", PAGE.read_text(), re.DOTALL)
    colours = dict(re.findall(r'(\w+): "(#[0-9a-f]{6})"', listed))
    own = re.findall(r"--target: (#[0-9a-f]{6})", PAGE.read_text())
    assert [{**colours, TARGET: each} for each in own] == [COLOURS]


def test_it_is_small_and_packaged(capsys: pytest.CaptureFixture[str]) -> None:
    size = PAGE.stat().st_size
    with capsys.disabled():
        print(f"\nThe page has {size:,} bytes; at most {MOST_BYTES:,} are allowed.")
    assert size <= MOST_BYTES
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert PAGE.name in packages["services.api.http"]
