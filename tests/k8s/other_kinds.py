"""Makes ``other_kinds_schema.json``: the fields of kinds that neither Kubernetes nor KubeRay defines, so that tests need not have those.

    npm pack @kubernetes-models/{gateway-api@2.0.0,cert-manager@6.0.0,prometheus-operator@6.0.0}    # and unpack each into FOLDER/NAME
    python -m tests.k8s.other_kinds FOLDER

The packages (MIT) are made of the types of Gateway API, cert-manager and Prometheus' operator (Apache-2.0). They have names, types and
what is required; patterns and bounds of values are not in them. Unknown fields are forbidden, as in the API server's strict checks.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "other_kinds_schema.json"
# The kinds that the chart makes, and where each is in the packages.
KINDS = {
    "GRPCRoute": "gateway-api/package/gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway-api/package/gateway.networking.k8s.io/v1",
    "Certificate": "cert-manager/package/cert-manager.io/v1",
    "PodMonitor": "prometheus-operator/package/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/package/monitoring.coreos.com/v1",
}
_PLAIN: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
    "number": {"type": "number"},
    "any": {},
    "unknown": {},
}


class _Types:
    """Reads declarations of TypeScript: one class or type a file, one field a line, others' types by imports."""

    def __init__(self, file: Path) -> None:
        self._folder = file.parent
        text = re.sub(r"/\*\*.*?\*/", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        self._imports = dict(re.findall(r'import \{ (\w+) \} from "(\.[^"]+)\.js"', text))
        named = re.search(r"^export declare class \w+ [^{]*\{(.*?)^\}", text, re.DOTALL | re.MULTILINE)
        fields = re.compile(r'^ {4}"([^"]+)"(\??): (.+?);$(?=\n(?: {4}[^ }]|$))', re.MULTILINE | re.DOTALL)
        self._fields = fields.findall(named[1]) if named else None
        alias = re.search(r"^export type I\w+ = (.+?);$", text, re.MULTILINE)
        self._alias = alias[1] if alias else None

    def field(self, name: str) -> dict[str, Any]:
        """The schema of one field of the class."""
        (found,) = (kind for field, _, kind in self._fields or () if field == name)
        return self._schema(found)

    def schema(self) -> dict[str, Any]:
        """The schema of the class or type."""
        if self._fields is None:
            assert self._alias is not None
            return self._schema(self._alias)
        return {
            "type": "object",
            "additionalProperties": False,
            "properties": {name: self._schema(kind) for name, _, kind in self._fields},
            "required": [name for name, optional, _ in self._fields if not optional],
        }

    def _schema(self, kind: str) -> dict[str, Any]:
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind in self._imports:
            return _Types((self._folder / self._imports[kind]).with_suffix(".d.ts")).schema()
        if items := re.fullmatch(r"Array<(.+)>", kind):
            return {"type": "array", "items": self._schema(items[1])}
        if "|" in kind:
            parts = [part.strip() for part in kind.split("|") if part.strip() != "null"]
            if all(re.fullmatch(r'"[^"]*"|\d+', part) for part in parts):
                return {"enum": [json.loads(part) for part in parts]}
            return self._schema(parts[0]) if len(parts) == 1 else {"anyOf": [self._schema(part) for part in parts]}
        if values := re.fullmatch(r"\{\s*\[key: string\]: (.+?);\s*\}", kind):
            return {"type": "object", "additionalProperties": self._schema(values[1])}
        # Kubernetes' own types, such as selectors, are checked by the API server's or not at all.
        return {}


@cache
def known() -> dict[str, Any]:
    """The schema of the ``spec`` of each kind, as it was written."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def definition(kind: str) -> dict[str, Any]:
    """A CustomResourceDefinition of a kind, for the API server's own checks."""
    group, version = KINDS[kind].rsplit("/", 2)[1:]
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": _structural(known()[kind])}, "required": ["spec"]}
    approved = {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/gateway-api/pull/2997"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "annotations": approved},
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def _structural(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` as the API server wants it: types everywhere, and nothing said of unknown fields, which strict checks refuse."""
    if not schema:
        return {"x-kubernetes-preserve-unknown-fields": True}
    made = dict(schema)
    if "enum" in schema:
        made["type"] = "string" if isinstance(schema["enum"][0], str) else "number"
    if "properties" in made:
        del made["additionalProperties"]
        made["properties"] = {name: _structural(value) for name, value in made["properties"].items()}
    for below in ("items", "additionalProperties"):
        if below in made:
            made[below] = _structural(made[below])
    return made


def schemas(folder: Path) -> dict[str, Any]:
    """The schema of the ``spec`` of each kind."""
    return {kind: _Types(folder / where / f"{kind}.d.ts").field("spec") for kind, where in KINDS.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(schemas(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
