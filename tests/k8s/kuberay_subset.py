"""Makes ``rayservice_schema.json`` from KubeRay's own CustomResourceDefinition (Apache-2.0), so that tests need not have that.

    python -m tests.k8s.kuberay_subset FOLDER

FOLDER holds ``ray.io_rayservices.yaml`` of KubeRay 1.7.0 (helm-chart/kuberay-operator/crds). Templates of pods and services, most
of its megabyte, are left out: they are Kubernetes' own, and checked against Kubernetes' schemas. Unknown fields are forbidden, as
the API server forbids them where a client asks for strict checks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "rayservice_schema.json"
# Where KubeRay's definitions are, if they are here at all.
FOLDER = Path(os.environ.get("KUBERAY_CRDS", Path(__file__).parents[3] / "shared" / "data" / "crds"))
CRD = "ray.io_rayservices.yaml"
_ELSEWHERE = ("template", "headService", "serveService")


def strict(schema: Any) -> Any:
    """A schema of OpenAPI v3 as one of JSON schema, which knows no other fields; without meanings and Kubernetes' own keywords."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "description" and not key.startswith("x-kubernetes-")}
    if schema.get("x-kubernetes-int-or-string"):
        kept.pop("type", None)
    made = {key: strict(value) for key, value in kept.items() if key != "properties"}
    if (properties := kept.get("properties")) is not None:
        made["properties"] = {
            name: {"type": "object"} if name in _ELSEWHERE else strict(value) for name, value in properties.items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    return made


def definition_in(file: Path) -> dict[str, Any]:
    """A CustomResourceDefinition; a megabyte of YAML takes Python's own reader seven seconds."""
    found: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return found


def subset(folder: Path) -> str:
    """The file's text, from the definition in ``folder``."""
    definition = definition_in(folder / CRD)
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema = version["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]
    made = strict(schema)
    made["properties"]["metadata"] = {"type": "object"}
    return json.dumps(made, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(subset(Path(sys.argv[1])), encoding="utf-8")
