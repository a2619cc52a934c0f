"""Mutual TLS between components: who may call whom, and certificates renewed while drafts are being streamed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme

from cluster.process.observing import Observing
from cluster.settings.config import load
from cluster.settings.recognition import check_tls_files
from outrider.internal.v1 import drafting_pb2_grpc
from services.access.audit import AuditLog
from services.access.refused_components import RefusedComponents
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.links.auth import bearer
from services.links.grpc_draft import GrpcDraftLink, serve_drafter
from services.links.grpc_retrieval import GrpcRetrievalLink, serve_retrieval
from services.links.tls import renewed_files
from services.links.tls.component_files import ComponentTls, check_files, expires_at
from services.links.tls.mutual import CallerTls
from services.metrics.prometheus_sink import PrometheusSink
from speculation.errors import ConfigurationError, Unavailable
from speculation.messages import Draft, RetrievalQuery, Retrieved
from tests.contract.test_draft_links import Recorder, opening
from tests.running.patience import PATIENCE_S
from tests.running.refusals import refuses
from tests.servers.component_certificates import tls_flags, write_certificates

WAIT_S = PATIENCE_S
TEXT = (1, 2, 3, 4, 1, 2, 3)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def drafting(files: ComponentTls) -> AsyncIterator[int]:
    """A drafter behind mutual TLS; gives its port."""
    drafter = DrafterService(DrafterConfig())
    await drafter.start()
    server, port = await serve_drafter(drafter, "127.0.0.1:0", "a token of sixteen", tls=files)
    yield port
    await server.stop(None)
    await drafter.stop()


@asynccontextmanager
async def linked(port: int, tls: CallerTls | None) -> AsyncIterator[tuple[GrpcDraftLink, Recorder]]:
    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    link, recorder = GrpcDraftLink(resolve, "a token of sixteen", tls), Recorder()
    await link.start(recorder)
    yield link, recorder
    await link.stop()


async def draft(link: GrpcDraftLink, recorder: Recorder, name: str) -> Draft:
    async with asyncio.timeout(WAIT_S):
        await recorder.connected.wait()
        link.open(opening(name, TEXT))
        reply = await recorder.replies.get()
    assert isinstance(reply, Draft)
    return reply


async def test_a_verifier_may_call_a_drafter_and_others_may_not(tmp_path: Path, authority: trustme.CA) -> None:
    server = write_certificates(tmp_path, authority, "drafter")
    verifier, retrieval = (write_certificates(tmp_path, authority, role) for role in ("verifier", "retrieval"))
    async with drafting(server) as port:
        async with linked(port, CallerTls(verifier, "drafter")) as (link, recorder):
            assert len((await draft(link, recorder, "a")).tree) > 0
        # What the wrong ones say is never heard; they connect, or try to, again and again.
        (tmp_path / "foreign").mkdir()
        stranger = write_certificates(tmp_path / "foreign", trustme.CA(), "verifier")
        for tls in (CallerTls(retrieval, "drafter"), CallerTls(replace(stranger, ca=verifier.ca), "drafter"), None):
            async with linked(port, tls) as (link, recorder):
                await asyncio.sleep(0.5)
                link.open(opening("b", TEXT))
                await asyncio.sleep(0.3)
                assert recorder.replies.empty()
        # A server that is no drafter is not believed to be one.
        async with linked(port, CallerTls(verifier, "retrieval")) as (_, recorder):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(recorder.connected.wait(), 0.7)


async def test_who_is_refused_is_told(tmp_path: Path, authority: trustme.CA, caplog: pytest.LogCaptureFixture) -> None:
    files = {role: write_certificates(tmp_path, authority, role) for role in ("drafter", "verifier", "retrieval")}
    sink, audit = PrometheusSink(), tmp_path / "audit"
    refused = RefusedComponents("drafter", AuditLog(str(audit)), sink)
    server, port = await serve_drafter(
        DrafterService(DrafterConfig()), "127.0.0.1:0", "a token of sixteen", tls=files["drafter"], refused=refused
    )
    for role, token in (("verifier", None), ("verifier", "another token"), ("retrieval", "a token of sixteen")):
        channel = CallerTls(files[role], "drafter").channel(f"127.0.0.1:{port}", [])
        call = drafting_pb2_grpc.DraftingServiceStub(channel).Draft(iter(()), metadata=bearer(token))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [reply async for reply in call]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await channel.close()
    await server.stop(None)
    told = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["component"], line["outcome"]) for line in told] == [
        ("drafter", "no_token"), ("drafter", "unknown_token"), ("drafter", "wrong_certificate"),
    ]  # fmt: skip
    assert told[2]["shown"] == "retrieval.outrider.internal" and told[0]["address"].startswith("ipv4:127.0.0.1:")
    text = sink.exposition().decode()
    for line in told:
        series = f'component="drafter",reason="{line["outcome"]}"'
        assert f"outrider_component_auth_failures_total{{{series}}} 1.0" in text
    assert caplog.text.count("the drafter refuses calls") == 3
    for _ in range(3):
        refused.note("no_token", "ipv4:127.0.0.1:1")
    assert caplog.text.count("the drafter refuses calls") == 3


def test_how_long_components_certificates_last(tmp_path: Path, authority: trustme.CA) -> None:
    files = write_certificates(tmp_path, authority, "drafter")
    tls = {name: str(getattr(files, name)) for name in ("certificate", "key", "ca")}
    settings = load(over={"cluster": {"tls": tls}, "server": {"audit_log": "/no/such/folder/audit"}}, environ={})
    observing = Observing(settings, on_ray=False)
    observing.component(settings, "drafter")
    (value,) = re.findall(
        r'component_certificate_expiry_timestamp_seconds\{component="drafter"\} (\S+)', observing.exposition().decode()
    )
    assert float(value) == expires_at(files.certificate)


async def test_only_a_drafter_may_look_something_up(tmp_path: Path, authority: trustme.CA) -> None:
    server = write_certificates(tmp_path, authority, "retrieval")
    drafter, verifier = (write_certificates(tmp_path, authority, role) for role in ("drafter", "verifier"))

    class Service:
        def look_up(self, queries: Sequence[RetrievalQuery]) -> list[Retrieved]:
            return [Retrieved(continuations=(), index_version="any") for _ in queries]

    running, port = await serve_retrieval(Service(), "127.0.0.1:0", tls=server)

    async def resolve() -> str:
        return f"127.0.0.1:{port}"

    query = RetrievalQuery(suffix=(1, 2, 3), max_continuations=1, max_length=4)
    for files, answered in ((drafter, True), (verifier, False)):
        link = GrpcRetrievalLink(resolve, tls=CallerTls(files, "retrieval"))
        await link.start()
        tries = 0
        while True:
            try:
                assert (await asyncio.wait_for(link.retrieve(query), WAIT_S)).index_version == "any"
                assert answered
                break
            except Unavailable:
                tries += 1
                if not answered and tries > 5:
                    break
                await asyncio.sleep(0.1)
        await link.stop()
    await running.stop(None)


def served_certificate(port: int, files: ComponentTls) -> bytes | None:
    """The certificate that the server shows at a new connection."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="drafter.outrider.internal") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)


async def test_certificates_are_renewed_while_drafts_are_streamed(tmp_path: Path, authority: trustme.CA) -> None:
    server, verifier = (write_certificates(tmp_path, authority, role) for role in ("drafter", "verifier"))
    tls = CallerTls(verifier, "drafter")
    async with drafting(server) as port, linked(port, tls) as (link, recorder):
        await draft(link, recorder, "before")
        first = await asyncio.to_thread(served_certificate, port, verifier)
        # A key that belongs to no certificate yet, as in the middle of a renewal: the old pair stays in use.
        other = authority.issue_cert("drafter.outrider.internal")
        key = server.key.read_bytes()
        server.key.write_bytes(other.private_key_pem.bytes())
        os.utime(server.key, (1, 1))
        assert await asyncio.to_thread(served_certificate, port, verifier) == first
        server.key.write_bytes(key)
        for role in ("drafter", "verifier"):
            write_certificates(tmp_path, authority, role)
        # The stream outlives the renewal, and so do its sessions.
        for name in range(5):
            await draft(link, recorder, f"during {name}")
        assert await asyncio.to_thread(served_certificate, port, verifier) != first
        async with linked(port, tls) as (newer, heard):
            await draft(newer, heard, "after")
        await draft(link, recorder, "still")


async def test_a_stream_is_made_anew_after_a_renewal(
    tmp_path: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection shows its certificate once. The next one shows the new one, and sessions are opened anew."""
    monkeypatch.setattr(renewed_files, "LOOK_S", 0.02)
    server, verifier = (write_certificates(tmp_path, authority, role) for role in ("drafter", "verifier"))
    async with drafting(server) as port, linked(port, CallerTls(verifier, "drafter")) as (link, recorder):
        await draft(link, recorder, "before")
        recorder.connected.clear()
        write_certificates(tmp_path, authority, "verifier")
        await draft(link, recorder, "after")
        recorder.connected.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(recorder.connected.wait(), 0.3)


def test_files_that_do_not_fit_are_named(tmp_path: Path, authority: trustme.CA) -> None:
    good = write_certificates(tmp_path, authority, "drafter")
    check_files(good)
    other = write_certificates(tmp_path, authority, "verifier")
    check_files(other)
    now, day = datetime.now(UTC), timedelta(days=1)

    def signed_by(by: trustme.CA, folder: str, **valid: datetime) -> ComponentTls:
        (tmp_path / folder).mkdir()
        files = write_certificates(tmp_path / folder, by, "verifier", **valid)
        return replace(files, ca=good.ca)

    for files, field, value, says in (
        (replace(good, role="retrieval"), "certificate", "drafter.pem", "retrieval.outrider.internal"),
        (replace(good, key=other.key), "certificate", "drafter.pem", "KEY_VALUES_MISMATCH"),
        (replace(good, ca=tmp_path / "none.pem"), "ca", "none.pem", ""),
        (replace(good, ca=good.key), "certificate", "drafter.pem", "certificates of the authority that signed it"),
        (signed_by(trustme.CA(), "stranger"), "certificate", "stranger/verifier.pem", "issuer certificate"),
        (signed_by(authority, "old", not_after=now - day), "certificate", "old/verifier.pem", "expired"),
        (signed_by(authority, "early", not_before=now + day), "certificate", "early/verifier.pem", "not yet valid"),
    ):
        with refuses(ConfigurationError, f"cluster.tls.{field}", value, says):
            check_files(files)


def test_the_role_in_the_paths(tmp_path: Path, authority: trustme.CA) -> None:
    for role in ("drafter", "verifier"):
        write_certificates(tmp_path, authority, role)
    flags = tls_flags(tmp_path)
    check_tls_files(load(flags=flags, environ={}))
    with refuses(ConfigurationError, field="cluster.tls.certificate", value="retrieval.pem"):
        check_tls_files(load(flags=[*flags, "retrieval.index=/somewhere"], environ={}))
