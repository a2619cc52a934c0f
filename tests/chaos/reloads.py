"""What components read again while they run: keys, certificates, an index. Replaced in mid-fault, and looked for afterwards."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from pathlib import Path

import trustme

import outrider
from benchmarks.soak.mortal_redis import MortalRedis
from benchmarks.soak.published_index import publish
from benchmarks.soak.service_processes import ServiceProcesses
from cluster.models.target import ResolvedModel
from services.access.key_records import hash_key, new_key
from services.links.tls.component_files import CALLERS, name_of
from speculation.errors import Unavailable
from tests.chaos.cells import CHAIN, NEW_COMPONENT_CERTIFICATES
from tests.servers.component_certificates import tls_flags, write_certificates

TEXTS = ("the quick brown fox jumps over the lazy dog " * 4, "()*+" * 30)
# Keys are looked at every second, certificates every five, Redis is tried again after at most thirty.
IN_USE_S = 60.0
_CALL_S = 10.0


class Reloads:
    """The files of a service that may change.

    Attributes:
        key: one that is always valid.
    """

    def __init__(self, folder: Path, model: ResolvedModel, redis: MortalRedis) -> None:
        self.key = new_key()
        self._folder, self._model, self._redis = folder, model, redis
        self._authority, self._components_authority = trustme.CA(), trustme.CA()
        self._other_key = self._old_key = new_key()
        self._version = ""
        self._turns = 0
        self._write_keys()
        self._write_certificate()
        self._write_component_certificates()

    @property
    def flags(self) -> list[str]:
        """The settings that name the files."""
        files = {"keys_file": "keys.yaml", "tls_certificate": "server.pem", "tls_key": "server.key"}
        return [*(f"server.{name}={self._folder / file}" for name, file in files.items()), *tls_flags(self._folder)]

    @property
    def roots(self) -> bytes:
        """The authority's certificate, in PEM."""
        pem: bytes = self._authority.cert_pem.bytes()
        return pem

    def context(self) -> ssl.SSLContext:
        """What trusts the authority."""
        return ssl.create_default_context(cadata=self.roots.decode())

    async def replace(self, what: str) -> None:
        """Replace what ``what`` names: a value of ``cells.RELOADS``."""
        self._turns += 1
        if what == "new keys":
            self._old_key, self._other_key = self._other_key, new_key()
            self._write_keys()
        elif what == "new certificate":
            self._write_certificate()
        elif what == NEW_COMPONENT_CERTIFICATES:
            self._write_component_certificates()
        else:
            self._version = await self._publish((*TEXTS, f"text number {self._turns}"))

    async def _publish(self, texts: tuple[str, ...]) -> str:
        """As who publishes does: where Redis is away, again."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + IN_USE_S
        while True:
            folder = Path(tempfile.mkdtemp(dir=self._folder)) / "index"
            try:
                return await asyncio.to_thread(publish, self._redis.url, self._model, texts, folder)
            except Unavailable:
                if clock() > ends_at:
                    raise
                await asyncio.sleep(0.2)

    def _write_keys(self) -> None:
        records = [f"- {{hash: {hash_key(key)}}}\n" for key in (self.key, self._other_key)]
        (self._folder / "keys.yaml").write_text("".join(records))

    def _write_certificate(self) -> None:
        issued = self._authority.issue_cert("localhost", "127.0.0.1")
        (self._folder / "server.key").write_bytes(issued.private_key_pem.bytes())
        (self._folder / "server.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))

    def _write_component_certificates(self) -> None:
        for role in CHAIN:
            write_certificates(self._folder, self._components_authority, role)

    async def unused(self, what: str, service: ServiceProcesses) -> list[str]:
        """Where what was replaced is not in use after a while, a line each; users' calls are all that happens meanwhile."""
        looks = {
            "new keys": self._keys_unused,
            "new certificate": self._certificate_unused,
            "new index": self._index_unused,
            NEW_COMPONENT_CERTIFICATES: self._component_certificates_unused,
        }
        clock = asyncio.get_running_loop().time
        ends_at = clock() + IN_USE_S
        left = await looks[what](service)
        while left and clock() < ends_at:
            await asyncio.sleep(0.5)
            left = await looks[what](service)
        return left

    async def _keys_unused(self, service: ServiceProcesses) -> list[str]:
        left = []
        for number, router in enumerate(service.processes["router"]):
            address = f"127.0.0.1:{router.port}"
            if not await self._accepted(address, self._other_key):
                left.append(f"router {number}: the new key is refused")
            if await self._accepted(address, self._old_key):
                left.append(f"router {number}: the revoked key is accepted")
        return left

    async def _accepted(self, address: str, key: str) -> bool:
        retry = outrider.Retry(attempts=1)
        async with outrider.AsyncClient(
            address, api_key=key, tls=True, root_certificates=self.roots, retry=retry, timeout_s=_CALL_S
        ) as client:
            try:
                return bool(await client.models())
            except outrider.Unauthenticated:
                return False

    async def _certificate_unused(self, service: ServiceProcesses) -> list[str]:
        wanted = ssl.PEM_cert_to_DER_cert((self._folder / "server.pem").read_text())
        left = []
        for number, router in enumerate(service.processes["router"]):
            for port, protocol in ((router.port, "h2"), (service.web_ports[number], "http/1.1")):
                context = self.context()
                context.set_alpn_protocols([protocol])
                if await asyncio.to_thread(_shown, port, context, "localhost") != wanted:
                    left.append(f"router {number}: the old certificate is shown at {protocol}")
        return left

    async def _component_certificates_unused(self, service: ServiceProcesses) -> list[str]:
        left = []
        for role, callers in CALLERS.items():
            wanted = ssl.PEM_cert_to_DER_cert((self._folder / f"{role}.pem").read_text())
            context = ssl.create_default_context(cafile=self._folder / "authority.pem")
            context.load_cert_chain(self._folder / f"{callers[0]}.pem", self._folder / f"{callers[0]}.key")
            context.set_alpn_protocols(["h2"])
            for number, process in enumerate(service.processes[role]):
                if await asyncio.to_thread(_shown, process.port, context, name_of(role)) != wanted:
                    left.append(f"{role} {number}: the old certificate is shown to components")
        return left

    async def _index_unused(self, service: ServiceProcesses) -> list[str]:
        left = []
        for number, process in enumerate(service.processes["retrieval"]):
            if f"outrider_index_info{{{self._version}}}" not in await process.numbers():
                left.append(f"retrieval {number}: the index in use is not the one that is live")
        return left


def _shown(port: int, context: ssl.SSLContext, name: str) -> bytes | None:
    """The certificate that a server shows, in DER."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=_CALL_S) as plain,
        context.wrap_socket(plain, server_hostname=name) as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)
