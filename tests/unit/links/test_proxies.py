"""A proxy that the environment names is the way to elsewhere: not to components, and not to this machine."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import outrider
from cli.scraping import read
from outrider._addresses import host_of, is_loopback, names_port
from services.links.channel import client_options
from services.links.probe import answers
from speculation.errors import Unavailable
from tests.running.ports import free_port

_NAMES = ("http_proxy", "https_proxy", "grpc_proxy")


@pytest.fixture(autouse=True)
def proxied(monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of a company: a proxy that reaches nothing of ours."""
    proxy = f"http://127.0.0.1:{free_port()}"
    for name in (*_NAMES, *map(str.upper, _NAMES)):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    return proxy


@contextmanager
def metrics() -> Iterator[str]:
    """A server with one number of Outrider."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # named by http.server
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# TYPE outrider_num_requests_open gauge\noutrider_num_requests_open 3\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_numbers_of_this_machine_are_read_directly() -> None:
    with metrics() as url:
        assert read([url]).sum("num_requests_open") == 3


_SERVER_AND_PROBE = """
import asyncio, sys
from services.links.channel import bind, make_server
from services.links.probe import answers
from services.links.channel import client_options
import grpc.aio, outrider

async def main():
    server = make_server(1 << 20)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    # Where somebody answers, the error says that there is no such method.
    assert await asyncio.to_thread(answers, address, "/a.B/C", None), "the probe went through the proxy"
    async with grpc.aio.insecure_channel(address, options=client_options(1 << 20)) as channel:
        try:
            await channel.unary_unary("/a.B/C")(b"", timeout=5)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED, error.code()
    async with outrider.AsyncClient(address, timeout_s=5, retry=outrider.Retry(attempts=1)) as client:
        try:
            await client.models()
        except outrider.OutriderError as error:
            assert "UNIMPLEMENTED" in repr(error) or "not found" in str(error).lower(), str(error)
    await server.stop(0)

asyncio.run(main())
"""


def test_components_and_clients_on_this_machine_call_directly() -> None:
    # In a process of its own: gRPC reads the environment once.
    ended = subprocess.run(
        [sys.executable, "-c", _SERVER_AND_PROBE],
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_component_elsewhere_is_called_directly_too() -> None:
    assert ("grpc.enable_http_proxy", 0) in client_options(1)


def test_an_error_names_the_proxy() -> None:
    with (
        outrider.Client("outrider.invalid:50051", timeout_s=5, retry=outrider.Retry(attempts=1)) as client,
        pytest.raises(outrider.OutriderError) as raised,
    ):
        client.models()
    assert "grpc_proxy" in str(raised.value)
    assert "no_proxy=outrider.invalid" in str(raised.value)


def test_nobody_answers_at_an_empty_port() -> None:
    assert not answers(f"127.0.0.1:{free_port()}", "/a.B/C", None, timeout_s=1)


def test_addresses_of_this_machine_are_told_from_others() -> None:
    here = "127.0.0.1:1", "127.8.8.8:1", "localhost:1", "LOCALHOST:1", "[::1]:1", "unix:/a/b", "dns:///localhost:1"
    elsewhere = "10.0.0.1:1", "example.com:443", "dns:///example.com:443", "[2001:db8::1]:1"
    assert [each for each in (*here, *elsewhere) if is_loopback(host_of(each))] == [*here]


@pytest.mark.parametrize(
    ("address", "has"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:5", True),
        ("unix:/a", True),
        ("dns:///host:4", True),
        ("host:http", True),
        ("host", False),
        ("dns:///host", False),
        ("dns:host", False),
        ("dns:host:4", True),
    ],
)
def test_who_forgets_the_port_is_told(address: str, has: bool) -> None:
    assert names_port(address) == has


@pytest.mark.parametrize("address", ["http://127.0.0.1:8000", "https://host:1", "HTTP://host"])
def test_a_url_is_no_address(address: str) -> None:
    with pytest.raises(outrider.InvalidArgument, match="without http://") as raised:
        outrider.Client(address)
    assert raised.value.field == "address"


def test_why_no_metrics_come_is_said_in_words() -> None:
    with pytest.raises(
        Unavailable, match=r"no metrics at http://127\.0\.0\.1:1/metrics \(Connection refused\); start a server"
    ):
        read(["http://127.0.0.1:1/metrics"])
