"""Strict checks of manifests: Kubernetes' own kinds by Kubernetes' schemas, RayService by KubeRay's, those of others by theirs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from tests.k8s import kuberay_subset, other_kinds
from tests.k8s.chart import Manifest

# The oldest that the chart allows, and the latest that the package knows.
VERSIONS = ("1.28", "1.37")


@cache
def _rayservice() -> Any:
    return jsonschema.Draft202012Validator(json.loads(kuberay_subset.FILE.read_text(encoding="utf-8")))


def check(manifest: Manifest) -> None:
    """Check one manifest and the templates in it; an error of the validators says what is wrong."""
    kind = manifest["kind"]
    if kind == "RayService":
        _rayservice().validate(manifest)
        for template in pod_templates(manifest):
            check_built_in({"apiVersion": "v1", "kind": "Pod", **template})
    elif kind in other_kinds.KINDS:
        jsonschema.validate(manifest["spec"], other_kinds.known()[kind])
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
