"""Strict checks of manifests: Kubernetes' own kinds by Kubernetes' schemas, RayService by KubeRay's, what others define by their fields."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from tests.k8s.chart import Manifest
from tests.k8s.kuberay_subset import FILE

# The oldest that the chart allows, and the latest that the package knows.
VERSIONS = ("1.28", "1.37")

_OBJECT: dict[str, Any] = {"type": "object"}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_ROUTE = {"parentRefs": {"type": "array", "minItems": 1}, "hostnames": _TEXTS, "rules": {"type": "array", "minItems": 1}}
# Fields that the chart uses of kinds whose definitions are not here.
OTHERS: dict[str, dict[str, Any]] = {
    "PodMonitor": {
        "selector": _OBJECT,
        "podTargetLabels": _TEXTS,
        "podMetricsEndpoints": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"port": {"type": "string"}, "interval": {"type": "string"}},
            },
        },
    },
    "PrometheusRule": {"groups": {"type": "array", "minItems": 1}},
    "GRPCRoute": _ROUTE,
    "HTTPRoute": _ROUTE,
}


@cache
def _rayservice() -> Any:
    return jsonschema.Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))


def check(manifest: Manifest) -> None:
    """Check one manifest and the templates in it; an error of the validators says what is wrong."""
    kind = manifest["kind"]
    if kind == "RayService":
        _rayservice().validate(manifest)
        for template in pod_templates(manifest):
            check_built_in({"apiVersion": "v1", "kind": "Pod", **template})
    elif kind in OTHERS:
        schema = {"type": "object", "additionalProperties": False, "properties": OTHERS[kind], "required": [*OTHERS[kind]]}
        schema["required"] = [name for name in OTHERS[kind] if name != "hostnames"]
        jsonschema.validate(manifest["spec"], schema)
    else:
        check_built_in(manifest)


def check_built_in(manifest: Manifest) -> None:
    """Check a manifest of Kubernetes' own."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not here (pip install it)")
    for version in VERSIONS:
        validate.validate(manifest, version, strict=True)


def pod_templates(manifest: Manifest) -> list[dict[str, Any]]:
    """The templates of pods in a manifest; a pod is its own."""
    if manifest["kind"] == "RayService":
        cluster = manifest["spec"]["rayClusterConfig"]
        return [each["template"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    if manifest["kind"] == "Pod":
        return [manifest]
    return [manifest["spec"]["template"]] if manifest["kind"] in ("StatefulSet", "Deployment", "Job") else []
