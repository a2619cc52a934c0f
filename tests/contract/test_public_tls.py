"""The public servers over TLS: calls, wrong callers, and certificates renewed without a restart."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

import outrider
from outrider import AsyncClient, Retry
from services.api.config import HttpConfig, PublicServerConfig, TlsFiles
from services.api.grpc.server import serve_public
from services.api.http.server import serve_http
from services.links.tls import renewed_files
from tests.servers.scripted_router import ScriptedRouter

WAIT_S = 30


def write(folder: Path, authority: trustme.CA) -> TlsFiles:
    """A new pair for localhost, and the authority's own certificate in authority.pem."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    files = TlsFiles(certificate=folder / "server.pem", key=folder / "server.key")
    files.key.write_bytes(issued.private_key_pem.bytes())
    files.certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return files


@asynccontextmanager
async def served(files: TlsFiles) -> AsyncIterator[tuple[str, str]]:
    """Both servers in front of a scripted router; gives the URL of HTTP and the address of gRPC."""
    router, public = ScriptedRouter("secret words"), PublicServerConfig(port=0, tls=files)
    http = await serve_http(router, HttpConfig(port=0, public=public))
    grpc = await serve_public(router, public)
    try:
        yield http.url, grpc.address
    finally:
        await http.stop(0)
        await grpc.stop(0)


def shown(address: str, folder: Path, protocol: str) -> bytes | None:
    """The certificate that a server shows at a new connection."""
    context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    context.set_alpn_protocols([protocol])
    host, port = address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)


async def test_calls_over_tls_and_none_without(tmp_path: Path) -> None:
    authority = trustme.CA()
    async with served(write(tmp_path, authority)) as (url, address):
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        asked = {"messages": [{"role": "user", "content": "x"}]}
        async with httpx2.AsyncClient(verify=context, timeout=WAIT_S) as client:
            whole = (await client.post(f"{url}/v1/chat/completions", json=asked)).json()
            assert whole["choices"][0]["message"]["content"] == "secret words"
            streamed = await client.post(f"{url}/v1/chat/completions", json={**asked, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        async with httpx2.AsyncClient(timeout=WAIT_S) as stranger:
            with pytest.raises(httpx2.ConnectError, match="certificate verify failed"):
                await stranger.get(f"{url}/health")
            with pytest.raises(httpx2.HTTPError):
                await stranger.get(f"{url.replace('https', 'http')}/health")
        roots = (tmp_path / "authority.pem").read_bytes()
        async with AsyncClient(address, tls=True, root_certificates=roots) as grpc:
            assert (await grpc.generate(token_ids=[1])).text == "secret words"
        async with AsyncClient(address, retry=Retry(attempts=1), timeout_s=5) as plain:
            with pytest.raises((outrider.Unavailable, outrider.DeadlineExceeded)):
                await plain.generate(token_ids=[1])


async def refusal(address: str, **options: Any) -> str:
    """What a client is told whose TLS is not the server's."""
    async with AsyncClient(address, retry=Retry(attempts=1), timeout_s=WAIT_S, **options) as client:
        with pytest.raises(outrider.Unavailable) as caught:
            await client.generate(token_ids=[1])
    return str(caught.value)


async def test_a_client_whose_tls_is_not_the_servers_is_told_what_differs(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = write(tmp_path, authority)
    roots = (tmp_path / "authority.pem").read_bytes()
    async with served(files) as (_, address):
        assert "If it speaks TLS, ask it so" in await refusal(address)
        assert f"the certificate of {address} is not trusted here" in await refusal(address, tls=True)
    other = authority.issue_cert("other.example")
    files.key.write_bytes(other.private_key_pem.bytes())
    files.certificate.write_bytes(b"".join(part.bytes() for part in other.cert_chain_pems))
    async with served(files) as (_, address):
        assert f"the certificate of {address} is for another name" in await refusal(
            address, tls=True, root_certificates=roots
        )
    plain = await serve_public(ScriptedRouter("words"), PublicServerConfig(port=0))
    assert await refusal(plain.address, tls=True) == f"{plain.address} speaks no TLS: ask it without (no tls=True, no --tls)"
    await plain.stop(0)


async def test_renewed_certificates_are_shown_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed_files, "LOOK_S", 0.02)
    authority = trustme.CA()
    files = write(tmp_path, authority)
    async with served(files) as (url, address):
        places = {"http/1.1": url.removeprefix("https://"), "h2": address}
        first = {kind: await asyncio.to_thread(shown, where, tmp_path, kind) for kind, where in places.items()}
        assert len(set(first.values())) == 1
        context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        async with httpx2.AsyncClient(verify=context, timeout=WAIT_S) as kept:
            assert (await kept.get(f"{url}/health")).status_code == 200
            write(tmp_path, authority)
            for kind, where in places.items():
                async with asyncio.timeout(WAIT_S):
                    while await asyncio.to_thread(shown, where, tmp_path, kind) == first[kind]:
                        await asyncio.sleep(0.05)
            # Connections that exist live on.
            assert (await kept.get(f"{url}/health")).status_code == 200
        # A key without its certificate, in the middle of a renewal: the good pair stays.
        good = await asyncio.to_thread(shown, places["h2"], tmp_path, "h2")
        files.key.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
        await asyncio.sleep(0.2)
        assert {await asyncio.to_thread(shown, where, tmp_path, kind) for kind, where in places.items()} == {good}


async def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewed_files, "LOOK_S", 0.02)
    authority = trustme.CA()
    files = write(tmp_path, authority)
    async with served(files) as (url, _):
        place = url.removeprefix("https://")
        first = await asyncio.to_thread(shown, place, tmp_path, "http/1.1")
        load, failed = ssl.SSLContext.load_cert_chain, []

        def half_written(context: ssl.SSLContext, *arguments: Any, **more: Any) -> None:
            # The check, which tries with a password, has found them to fit.
            if arguments[0] == files.certificate and not more and not failed:
                failed.append(arguments)
                raise ssl.SSLError("planted")
            load(context, *arguments, **more)

        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", half_written)
        write(tmp_path, authority)
        async with asyncio.timeout(WAIT_S):
            while not failed or await asyncio.to_thread(shown, place, tmp_path, "http/1.1") == first:
                await asyncio.sleep(0.05)
