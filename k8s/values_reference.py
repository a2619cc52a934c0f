"""Writes what follows from values.yaml: values.schema.json, and the table in the chart's README.

    python -m k8s.values_reference

What a value is called, means and defaults to stands in values.yaml alone; its bounds stand here; `settings` is the very
tree that the command line reads (cluster/settings/config.py), less what the chart decides. A test checks that both files are
fresh.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.settings.config import Settings
from speculation.sources import STRATEGIES

CHART = Path(__file__).parent / "outrider"
GROUPS = ("head", "router", "drafting", "verifier")
# Lines of the README between which the table stands.
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"

# Settings that the chart makes itself, from the ports, mounts and groups that it makes.
OWN = (
    "internal_token",
    "internal_token_file",
    "cache_dir",
    "drafting_dir",
    "cluster.placement.drafter",
    "cluster.placement.retrieval",
    "cluster.placement.router",
    "cluster.placement.stages",
    "cluster.placement.verifier",
    "cluster.tls",
    "retrieval.answers_key",
    "retrieval.redis_password",
    "server.host",
    "server.keys_file",
    "server.ops_host",
    "server.ops_port",
    "router.learning_redis_password",
    "server.stored_responses_redis_password",
    "server.tls_certificate",
    "server.tls_key",
    "router.max_replicas_per_node",
    "drafter.host",
    "drafter.max_replicas_per_node",
    "retrieval.host",
    "retrieval.max_replicas_per_node",
    "verifier.max_replicas_per_node",
    "verifier.stage_host",
)

_SECRET = {"pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
_SECRET_KEY = {"pattern": r"^[-._a-zA-Z0-9]+$", "maxLength": 253}
_CPU = {"type": ["string", "number"], "pattern": r"^([1-9][0-9]*m|[0-9]+(\.[0-9]+)?)$", "minimum": 0}
_BYTES = {"pattern": r"^[0-9]+(\.[0-9]+)?([KMGTP]i|[kMGTP])$"}
_TEXTS = {"additionalProperties": {"type": "string"}}
_PORT = {"minimum": 1, "maximum": 65535}
_CIDR = {"pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}
_PEER = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {name: {"type": "object"} for name in ("podSelector", "namespaceSelector", "ipBlock")},
}
_PARENT = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        **{name: {"type": "string"} for name in ("name", "namespace", "sectionName", "group", "kind")},
        "port": {"type": "integer", **_PORT},
    },
}
_HOST = r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_HOURS = {"pattern": r"^[1-9][0-9]{0,5}h$"}
# Of an image: a tag or a digest, but not what changes under one's feet.
_NOT_LATEST = {"not": {"pattern": "(^|:)latest$"}}

# Bounds by path; a * stands for one name.
BOUNDS: dict[str, dict[str, Any]] = {
    "fullnameOverride": {"pattern": r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 40},
    "image.repository": {"pattern": r"^[a-z0-9][-a-z0-9._/:]*$"},
    "image.tag": {"pattern": r"^([A-Za-z0-9_][-A-Za-z0-9_.]*)?$", "maxLength": 128, **_NOT_LATEST},
    "image.digest": {"pattern": r"^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.pullSecrets": {"items": {"type": "string", **_SECRET, "minLength": 1}},
    "*.secretName": _SECRET,
    "*.secretKey": _SECRET_KEY,
    "componentTls.*": _SECRET,
    "certificates.*.issuer.name": _SECRET,
    "certificates.*.issuer.kind": {"pattern": r"^[A-Z][A-Za-z0-9]*$"},
    "certificates.*.issuer.group": {"pattern": f"^{_HOST}$"},
    "certificates.public.dnsNames": {"items": {"type": "string", "pattern": f"^{_HOST}$"}},
    "certificates.*.duration": _HOURS,
    "certificates.*.renewBefore": _HOURS,
    "ray.version": {"pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
    "ray.authSecretName": _SECRET,
    "*.*SecretName": _SECRET,
    "*.*SecretKey": _SECRET_KEY,
    "ray.gcsFaultTolerance.passwordSecretName": _SECRET,
    "ray.gcsFaultTolerance.passwordSecretKey": _SECRET_KEY,
    "ray.gcsFaultTolerance.redisAddress": {"pattern": r"^([-A-Za-z0-9.]+:[0-9]{1,5})?$"},
    "storage.existingClaim": _SECRET,
    "storage.size": _BYTES,
    "storage.accessMode": {"enum": ["ReadWriteMany", "ReadWriteOnce"]},
    "storage.mountPath": {"pattern": r"^/(mnt|srv|data|models|var/lib)(/[-A-Za-z0-9._]+)*$"},
    "redis.image": {"pattern": r"^[a-z0-9][-a-z0-9._/:]*(:[\w][-\w.]*|@sha256:[0-9a-f]{64})$", **_NOT_LATEST},
    "redis.command": {"pattern": r"^[-A-Za-z0-9_/.]+$"},
    "redis.cpu": _CPU,
    "redis.memory": _BYTES,
    "redis.size": _BYTES,
    "service.type": {"enum": ["ClusterIP", "LoadBalancer", "NodePort"]},
    "service.grpcPort": _PORT,
    "service.httpPort": _PORT,
    "service.annotations": _TEXTS,
    "gateway.parentRefs": {"items": _PARENT},
    "gateway.hostnames": {"items": {"type": "string", "pattern": f"^{_HOST}$"}},
    "ingress.host": {"pattern": f"^({_HOST})?$"},
    "ingress.annotations": _TEXTS,
    "groups.*.cpu": _CPU,
    "groups.*.memory": _BYTES,
    "groups.*.sharedMemory": _BYTES,
    "groups.*.temporary": _BYTES,
    "groups.*.gpus": {"minimum": 0, "maximum": 16},
    "groups.*.gpuResource": {"pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"},
    "groups.*.gpuMemory": {"pattern": rf"^$|{_BYTES['pattern']}"},
    "groups.*.gpuDriver": {"pattern": r"^$|^[0-9]{3}(\.[0-9]+){0,2}$"},
    "groups.*.extraResources": {"additionalProperties": {"type": ["string", "integer"]}},
    "groups.*.capabilities": {"items": {"enum": ["IPC_LOCK"]}},
    "groups.*.env": {
        **_TEXTS,
        # Secrets have their own values, and settings theirs; how long Ray drains follows from settings.
        "propertyNames": {"not": {"pattern": "(^OUTRIDER_|TOKEN|PASSWORD|SECRET|API_?KEY|^RAY_GRACEFUL_)"}},
    },
    "groups.*.nodeSelector": _TEXTS,
    "groups.*.tolerations": {"items": {"type": "object"}},
    "groups.*.spreadOver": {"pattern": r"^([a-z0-9.]+/)?[-A-Za-z0-9_.]*$"},
    "groups.*.labels": _TEXTS,
    "groups.*.annotations": _TEXTS,
    "autoscaler.idleTimeoutSeconds": {"minimum": 1},
    "autoscaler.cpu": _CPU,
    "autoscaler.memory": _BYTES,
    "networkPolicy.clients": {"items": _PEER},
    "networkPolicy.monitoring": {"items": _PEER, "minItems": 1},
    "networkPolicy.operator": {"items": _PEER, "minItems": 1},
    "networkPolicy.apiServerCidr": _CIDR,
    "networkPolicy.apiServerPorts": {"items": {"type": "integer", **_PORT}, "minItems": 1},
    "networkPolicy.extraEgress": {"items": {"type": "object", "required": ["to"]}},
    "podDisruptionBudget.maxUnavailable": {"minimum": 1},
    "monitoring.podMonitor.interval": {"pattern": r"^[1-9][0-9]*(ms|s|m)$"},
    "monitoring.*.labels": _TEXTS,
    "upgrade.type": {"enum": ["NewCluster", "None"]},
    "serviceAccount.annotations": _TEXTS,
    "tests.strategy": {"enum": sorted(set(STRATEGIES) - {"autoregressive"})},
}  # fmt: skip


def _named(path: str) -> dict[str, Any]:
    """A schema that the value at ``path`` is there and not empty."""
    first, _, rest = path.partition(".")
    return {"required": [first], "properties": {first: _named(rest) if rest else {"minLength": 1}}}


def _true(path: str) -> dict[str, Any]:
    """A schema that the value at ``path`` is true."""
    first, _, rest = path.partition(".")
    return {"required": [first], "properties": {first: _true(rest) if rest else {"const": True}}}


def _filled(path: str) -> dict[str, Any]:
    """A schema that the list at ``path`` is not empty."""
    first, _, rest = path.partition(".")
    return {"required": [first], "properties": {first: _filled(rest) if rest else {"minItems": 1}}}


# What one value makes of others.
RULES: list[dict[str, Any]] = [
    {"if": _true("redis.enabled"), "then": _named("redis.passwordSecretName")},
    {"if": _true("redis.index"), "then": _true("redis.enabled")},
    {
        "if": {"allOf": [_true("ray.gcsFaultTolerance.enabled"), {"not": _true("redis.enabled")}]},
        "then": _named("ray.gcsFaultTolerance.redisAddress"),
    },
    {"if": _named("componentTls.verifier"), "then": _named("componentTls.drafter")},
    {"if": _named("componentTls.drafter"), "then": _named("componentTls.verifier")},
    {"if": _named("componentTls.retrieval"), "then": _named("componentTls.verifier")},
    {
        "if": _true("certificates.public.enabled"),
        "then": {
            "allOf": [
                _named("tls.secretName"),
                _named("certificates.public.issuer.name"),
                _filled("certificates.public.dnsNames"),
            ],
        },
    },
    {
        "if": _true("certificates.components.enabled"),
        "then": {"allOf": [_named("componentTls.verifier"), _named("certificates.components.issuer.name")]},
    },
    {
        "if": _true("gateway.enabled"),
        "then": _filled("gateway.parentRefs"),
    },
    {"if": _true("ingress.enabled"), "then": {"allOf": [_named("ingress.host"), _true("service.http")]}},
]


def values() -> dict[str, Any]:
    """values.yaml."""
    content: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return content


def meanings() -> dict[str, str]:
    """What values.yaml says of each value, by path; of the groups' common ones under groups.head."""
    found: dict[str, str] = {}
    path: list[str] = []
    said: list[str] = []
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        bare = line.strip()
        if bare.startswith("# --"):
            said = [bare.removeprefix("# --").strip()]
        elif bare.startswith("#") and said:
            said.append(bare.removeprefix("#").strip())
        elif (key := re.match(r"( *)([A-Za-z]\w*):", line)) is not None:
            path = [*path[: len(key[1]) // 2], key[2]]
            if said:
                found[".".join(path)] = " ".join(said)
            said = []
    return found


def _bounds(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, bounds in BOUNDS.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\w*"), path):
            found |= bounds
    return found


def _kind(default: Any) -> str:
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return kinds[type(default)]


def _schema_of(default: Any, path: str, said: dict[str, str]) -> dict[str, Any]:
    """The schema of a value: its kind from its default, its meaning and its bounds."""
    about = said.get(path) or said.get(re.sub(r"^groups\.\w+\.", "groups.head.", path))
    schema: dict[str, Any] = {"description": about} if about else {}
    if isinstance(default, dict) and default and not _bounds(path):
        below = {key: _schema_of(value, f"{path}.{key}", said) for key, value in default.items()}
        return schema | {"type": "object", "additionalProperties": False, "properties": below}
    return schema | {"type": _kind(default)} | _bounds(path)


def settings_schema() -> dict[str, Any]:
    """The schema of ``settings``: that of the settings' own classes, less what the chart decides."""
    whole = Settings.model_json_schema()
    schema = _inlined(whole, whole["$defs"])
    for path in OWN:
        section = schema
        *above, name = path.split(".")
        for each in above:
            section = section["properties"][each]
        del section["properties"][name]
    of = schema["properties"]
    for port in ("port", "http_port"):
        of["server"]["properties"][port] = {"type": "integer", **_PORT}
    # On Ray the components' numbers go through Ray's agents.
    of["metrics"]["properties"]["export"] = {"enum": ["ray", "none"]}
    # A password would lie in the ConfigMap.
    of["retrieval"]["properties"]["redis_url"] = {"type": "string", "pattern": r"^rediss?://[^@]+$"}
    return schema


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """``schema`` without references, titles and defaults; an alternative with null is a list of types."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        about = {key: schema[key] for key in ("description",) if key in schema}
        return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions) | about
    choices = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(choices) == 1:
        one = _inlined(choices[0], definitions)
        if "enum" in one:
            one["enum"] = [*one["enum"], None]
        if "type" in one:
            one["type"] = [one["type"], "null"]
        return one | {key: value for key, value in schema.items() if key not in ("anyOf", "default", "title")}
    dropped = ("$defs", "title", "default", "format")
    return {
        key: {name: _inlined(each, definitions) for name, each in value.items()}
        if key == "properties"
        else _inlined(value, definitions)
        for key, value in schema.items()
        if key not in dropped
    }


def schema() -> dict[str, Any]:
    """values.schema.json."""
    said = meanings()
    properties = {name: _schema_of(value, name, said) for name, value in values().items() if name != "settings"}
    settings = settings_schema() | {"description": said["settings"]}
    # Helm's own, and what it passes to a chart that another one uses.
    properties |= {"settings": settings, "global": {"type": "object"}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart outrider",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "allOf": RULES,
    }


def _rows(default: Any, path: str, said: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    # Groups differ in a few defaults only.
    if path in (f"groups.{group}" for group in GROUPS[1:]):
        common = values()["groups"]["head"]
        differing = {key: value for key, value in default.items() if value != common[key]}
        yield path, _shown(differing) if differing else "as the head", said[path]
        return
    if isinstance(default, dict) and default and not _bounds(path) and path != "settings":
        yield path, "", said[path]
        for key, value in default.items():
            yield from _rows(value, f"{path}.{key}", said)
        return
    yield path, _shown(default), said[path]


def _shown(default: Any) -> str:
    return f"`{json.dumps(default)}`"


def table() -> str:
    """The table of all values, as Markdown."""
    said = meanings()
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for name, default in values().items():
        for path, shown, about in _rows(default, name, said):
            cell = about.replace("|", "\\|")
            lines.append(f"| `{path}` | {shown} | {cell} |" if shown else f"| **`{path}`** | | {cell} |")
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """``readme`` with the table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def schema_text() -> str:
    """values.schema.json as it is written."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write both files."""
    (CHART / "values.schema.json").write_text(schema_text(), encoding="utf-8")
    readme = CHART / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
