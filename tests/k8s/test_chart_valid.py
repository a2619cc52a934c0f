"""What the chart makes is what Kubernetes and KubeRay take, down to every field."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.k8s.chart import CHART, PROFILES, Manifest, helm, needs_helm, of_kind, one, render
from tests.k8s.kuberay_subset import CRD, FILE, subset
from tests.k8s.schemas import check

pytestmark = needs_helm

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


@pytest.mark.parametrize("values", CASES)
def test_every_manifest_is_valid_to_the_last_field(values: Any) -> None:
    made = render(values)
    assert {"RayService", "Service", "ConfigMap", "ServiceAccount", "NetworkPolicy", "Pod"} <= {
        each["kind"] for each in made
    }
    for manifest in made:
        check(manifest)


@pytest.mark.parametrize("profile", PROFILES)
def test_helm_lint(profile: str) -> None:
    assert "0 chart(s) failed" in helm(
        "lint", "--strict", str(CHART), "--values", str(CHART / "profiles" / f"{profile}.yaml")
    )


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


def test_the_checks_find_what_is_wrong() -> None:
    made = render("cpu-demo")
    for wrong in mistyped(made):
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)
    policy = of_kind(made, "NetworkPolicy")[0]
    policy["spec"]["ingres"] = []
    with pytest.raises(jsonschema.ValidationError, match="ingres"):
        check(policy)


def test_the_schema_of_rayservice_is_fresh() -> None:
    folder = os.environ.get("KUBERAY_CRDS")
    if folder is None:
        pytest.skip(f"KUBERAY_CRDS names no folder with KubeRay's {CRD}")
    assert subset(Path(folder)) == FILE.read_text(encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8"))["additionalProperties"] is False
