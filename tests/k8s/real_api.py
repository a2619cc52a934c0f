"""Kubernetes' own API server, as far as it serves custom resources, on a real etcd; made by ``make test-k8s-api``.

It knows no users, and of Kubernetes' own kinds it knows the types, not the objects (api_server/main.go).
"""

from __future__ import annotations

import json
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.chart import Manifest
from tests.running.ports import free_port

_MADE = Path(__file__).parents[2] / "build" / "api-server"
_PROGRAM, _ETCD = _MADE / "api-server", _MADE / "etcd"
needs_api_server = pytest.mark.skipif(
    not (_PROGRAM.is_file() and _ETCD.is_file()), reason="no API server is here: `make test-k8s-api` makes one"
)
_PATIENCE_S = 120
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class RefusedObject(Exception):
    """The API server refused an object; says what it said."""


def refused_built_ins(manifests: Iterable[Manifest]) -> list[str]:
    """What the API server's strict decoder says of objects of Kubernetes' own kinds, each with its number; empty: all are good."""
    told = subprocess.run(
        [_PROGRAM, "decode"],
        input="\n".join(json.dumps(each) for each in manifests),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return told.stdout.splitlines()


class ApiServer:
    """A running API server, empty at first; ``folder`` holds its data and logs."""

    def __init__(self, folder: Path) -> None:
        port, store, peers = free_port(), free_port(), free_port()
        self._url, self._paths = f"https://127.0.0.1:{port}", dict[str, str]()
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._start(
                _ETCD, "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--listen-client-urls", f"http://127.0.0.1:{store}",
                "--advertise-client-urls", f"http://127.0.0.1:{store}", "--listen-peer-urls", f"http://127.0.0.1:{peers}",
            )  # fmt: skip
            self._start(
                _PROGRAM, "serve", "--etcd-servers", f"http://127.0.0.1:{store}", "--secure-port", port,
                "--cert-dir", folder / "certificates",
            )  # fmt: skip
            self._wait(self._ready)
        except BaseException:
            self.stop()
            raise

    def _start(self, program: Path, *flags: object) -> None:
        with (self._folder / f"{program.name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen([program, *map(str, flags)], stdout=log, stderr=log))

    def stop(self) -> None:
        """End both, the API server first."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _ready(self) -> bool:
        assert all(process.poll() is None for process in self._processes), self._said()
        try:
            return self._ask("GET", "/readyz") == b"ok"
        except (OSError, RefusedObject):
            return False

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.1)

    def _said(self) -> list[str]:
        return [log.read_text()[-2000:] for log in self._folder.glob("*.log")]

    def define(self, definition: Manifest) -> None:
        """Add a CustomResourceDefinition, and wait until its kind is served.

        Raises:
            RefusedObject: it is not a valid one.
        """
        name, spec = definition["metadata"]["name"], definition["spec"]
        self._apply(f"{_DEFINITIONS}/{name}", definition)

        def served() -> bool:
            found = json.loads(self._ask("GET", f"{_DEFINITIONS}/{name}"))["status"].get("conditions") or []
            return ("Established", "True") in {(each["type"], each["status"]) for each in found}

        self._wait(served)
        self._paths[spec["names"]["kind"]] = spec["names"]["plural"]

    def knows(self, manifest: Manifest) -> bool:
        """Whether its kind is defined."""
        return manifest["kind"] in self._paths

    def apply(self, manifest: Manifest) -> Manifest:
        """Apply an object on the server; gives what is kept of it.

        Raises:
            RefusedObject: it is refused, as it is for any field that its definition does not have.
        """
        plural, name = self._paths[manifest["kind"]], manifest["metadata"]["name"]
        return self._apply(f"/apis/{manifest['apiVersion']}/namespaces/default/{plural}/{name}", manifest)

    def _apply(self, path: str, manifest: Manifest) -> Manifest:
        query = urllib.parse.urlencode({"fieldManager": "test", "force": "true"})
        made: Manifest = json.loads(self._ask("PATCH", f"{path}?{query}", manifest))
        return made

    def _ask(self, method: str, path: str, content: Manifest | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self._url}{path}",
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
        trusted = ssl.create_default_context(cafile=str(self._folder / "certificates" / "apiserver.crt"))
        try:
            with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
                read: bytes = answer.read()
                return read
        except urllib.error.HTTPError as error:
            raise RefusedObject(error.read().decode()) from error
