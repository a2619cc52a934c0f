"""The chart's profiles as this machine can run them, and what their secrets and volumes would mount.

Replaced through values: the model by a tiny one, bfloat16 on GPUs by float32 on the processor, eight ranks by two,
and what a pod has for itself (ports, folders) by this machine's. Ray still counts GPUs. Nothing else differs from a cluster.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from services.access.key_records import hash_key, new_key
from services.links.tls.component_files import name_of
from tests.k8s.chart import Manifest, groups, render, serve_config
from tests.running.ports import free_port

_SMALL: dict[str, Any] = {
    "settings": {
        "server": {"drain_delay_s": 0.5},
        "drafter": {"keep_calibration": False, "replicas": 1},
        "verifier": {
            "device": "cpu", "dtype": "float32", "kernels": "auto", "attention_backend": "auto", "kv_cache_tokens": 4096, "max_model_len": 512, "threads": 1, "budget": "fixed",
            "drain_s": 1,
        },
    },
}  # fmt: skip
# Fewer GPUs, in the same arrangement: one and two verifiers of several ranks on one node, and one verifier over two nodes.
_ARRANGED: dict[str, dict[str, Any]] = {
    "eight-h100-tp8": {
        "settings": {"verifier": {"tensor_parallel_size": 2, "num_cpus": 1}},
        "groups": {"verifier": {"gpus": 2}},
    },
    "eight-h100-two-tp4": {
        "settings": {"verifier": {"tensor_parallel_size": 2, "num_cpus": 1}},
        "groups": {"verifier": {"gpus": 4}},
    },
    "multi-node": {
        "settings": {
            "verifier": {"tensor_parallel_size": 2, "num_cpus": 1, "num_gpus": 2, "draft_deadline_s": 10},
            # The first look-up of a process takes longer than later ones.
            "drafter": {"retrieval_deadline_s": 1},
        },
        "groups": {"verifier": {"gpus": 4}},
        # The index lies in a Redis of this machine; Ray's control store, in Redis there, has a test of its own.
        "redis": {"enabled": False, "index": False, "passwordSecretName": ""},
        "indexRedis": {"urlSecretName": "outrider-index"},
        "ray": {"gcsFaultTolerance": {"enabled": False}},
    },
}


@dataclass(frozen=True, kw_only=True)
class Deployable:
    """A profile, ready for a Ray on this machine.

    Attributes:
        manifests: all that the chart renders.
        config: the RayService's serveConfigV2.
        api_key: for its API; None where it asks for none.
        ca: PEM of the authority of its certificate; None without TLS.
    """

    manifests: list[Manifest]
    config: dict[str, Any]
    grpc: str
    http: str
    host: str
    api_key: str | None
    ca: bytes | None


class Mounts:
    """What volumes and secrets would give to the pods: files in one folder, and the URL of the Redis with the index."""

    def __init__(self, folder: Path, index_url: str) -> None:
        self.folder, self.index_url = folder, index_url
        self.api_key, self._authority = new_key(), trustme.CA()
        self.ca = self._authority.cert_pem.bytes()
        self._write("keys/keys.yaml", json.dumps([{"hash": hash_key(self.api_key), "id": "test"}]))
        self._write("internal-token/token", "a token of this test alone")
        self._certificate("tls", "outrider.example.com", "127.0.0.1")
        for role in ("verifier", "drafter", "retrieval"):
            self._certificate(f"component-tls/{role}", name_of(role))

    def _certificate(self, name: str, *hosts: str) -> None:
        issued = self._authority.issue_cert(*hosts)
        self._write(f"{name}/tls.crt", "".join(part.bytes().decode() for part in issued.cert_chain_pems))
        self._write(f"{name}/tls.key", issued.private_key_pem.bytes().decode())
        self._write(f"{name}/ca.crt", self.ca.decode())

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def mounted(self, config: dict[str, Any], mount_path: str, volume: Path) -> dict[str, Any]:
        """``config`` with this machine's folders in the place of those in pods."""
        text = json.dumps(config).replace("/etc/outrider/", f"{self.folder}/").replace(f'"{mount_path}', f'"{volume}')
        found: dict[str, Any] = json.loads(text)
        return found


def deployable(profile: str, model: Path, volume: Path, mounts: Mounts, *more: dict[str, Any]) -> Deployable:
    """``profile``, with further values in ``more``; ``volume`` is the folder that all pods share."""
    ports = {"settings": {"model": str(model), "server": {"port": free_port(), "http_port": free_port()}}}
    manifests = render(profile, _SMALL, _ARRANGED.get(profile, {}), ports, *more)
    config = serve_config(manifests)
    (application,) = config["applications"]
    given = application["args"]
    config = mounts.mounted(config, given["cache_dir"], volume)
    # Pods have an ops port each; here it is another program's for all that the chart knows.
    config["applications"][0]["args"]["server"]["ops_port"] = 0
    if _index_url_in_secret(manifests):
        # As the head's environment says it, which all profiles share here.
        config["applications"][0]["args"]["retrieval"]["redis_url"] = mounts.index_url
    secure = "tls_certificate" in given["server"]
    return Deployable(
        manifests=manifests,
        config=config,
        grpc=f"127.0.0.1:{given['server']['port']}",
        http=f"{'https' if secure else 'http'}://127.0.0.1:{given['server']['http_port']}",
        host=(given["server"].get("http_hosts") or ["127.0.0.1"])[0],
        api_key=mounts.api_key if "keys_file" in given["server"] else None,
        ca=mounts.ca if secure else None,
    )


def _index_url_in_secret(manifests: list[Manifest]) -> bool:
    (head,) = groups(manifests)["head"]["template"]["spec"]["containers"]
    return any(each["name"] == "OUTRIDER_RETRIEVAL__REDIS_URL" and "valueFrom" in each for each in head["env"])
