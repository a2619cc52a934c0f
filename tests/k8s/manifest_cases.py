"""What the suites of manifests render: each profile, everything at once, and what is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.k8s.chart import PROFILES, Manifest, one

# Everything that can be switched on, at once.
EVERYTHING: dict[str, Any] = {
    "settings": {
        "retrieval": {"num_cpus": 0.25},
        "verifier": {"num_cpus": 1, "autoscaling": {"max_replicas": 3}},
        "router": {"autoscaling": {"min_replicas": 2, "max_replicas": 4}},
    },
    "image": {"pullSecrets": ["registry"], "digest": f"sha256:{'a' * 64}"},
    "apiKeys": {"secretName": "keys"},
    "internalToken": {"secretName": "token"},
    "tls": {"secretName": "tls"},
    "componentTls": {"verifier": "v", "drafter": "d", "retrieval": "r"},
    "certificates": {
        "public": {"enabled": True, "issuer": {"name": "acme", "kind": "ClusterIssuer"}, "dnsNames": ["a.example.com"]},
        "components": {"enabled": True, "issuer": {"name": "ours"}, "duration": "720h", "renewBefore": "240h"},
    },
    "ray": {"authSecretName": "ray", "gcsFaultTolerance": {"enabled": True}},
    "redis": {"enabled": True, "index": True, "passwordSecretName": "redis", "storageClassName": "fast"},
    "storage": {"storageClassName": "shared"},
    "service": {"type": "LoadBalancer", "annotations": {"a.example/b": "c"}},
    "gateway": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.example.com"]},
    "ingress": {
        "enabled": True, "host": "a.example.com", "className": "nginx", "tlsSecretName": "web",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "600"},
    },
    "groups": {
        group: {
            "labels": {"team": "inference"}, "annotations": {"a.example/b": "c"}, "priorityClassName": "high",
            "nodeSelector": {"pool": "a"}, "tolerations": [{"operator": "Exists"}], "spreadOver": "kubernetes.io/hostname",
            "extraResources": {"rdma/ib": 1}, "capabilities": ["IPC_LOCK"], "env": {"NCCL_DEBUG": "WARN"},
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        }
        for group in ("head", "router", "drafting", "verifier")
    },
    "networkPolicy": {
        "fetchModels": True, "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 4317}]}],
    },
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
    "serviceAccount": {"annotations": {"a.example/b": "c"}},
    "tests": {"apiKeySecretName": "key"},
}  # fmt: skip
CASES: list[Any] = [*PROFILES, pytest.param(EVERYTHING, id="everything")]


def mistyped(manifests: list[Manifest]) -> list[Manifest]:
    """The RayService with a wrong field, in several places."""
    good = one(manifests, "RayService")
    found = []
    for change in (
        lambda each: each["spec"].update(serveConfig="x"),
        lambda each: each["spec"]["rayClusterConfig"].update(authOption={}),
        lambda each: each["spec"]["rayClusterConfig"]["headGroupSpec"].update(rayStartParam={}),
        lambda each: each["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="one"),
        lambda each: each["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"].update(nodeSelektor={}),
        lambda each: each["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0].update(
            readynessProbe={}
        ),
    ):
        found.append(copy.deepcopy(good))
        change(found[-1])
    return found
