"""A gallery of wrong values: each is refused, by Helm through the chart's schema or by `outrider plan`, and the value is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.checks.offered import in_manifests
from cluster.checks.pods import preflight_in_pods
from cluster.settings.config import load
from speculation.errors import ConfigurationError
from tests.k8s.chart import RefusedValues, needs_helm, render, text

pytestmark = needs_helm

ROOT = Path(__file__).parents[2]
GPU = {"device": "cuda", "num_gpus": 1}


def verifier(**settings: Any) -> dict[str, Any]:
    return {"settings": {"verifier": settings}}


def group(name: str, **values: Any) -> dict[str, Any]:
    return {"groups": {name: values}}


# Values, and what Helm says of them.
BY_SCHEMA: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"replicas": 3}, "Additional property replicas is not allowed"),
    "an unknown value below": ({"service": {"prot": 1}}, "service: Additional property prot is not allowed"),
    "an unknown setting": (verifier(stagez=2), "settings.verifier: Additional property stagez is not allowed"),
    "a setting out of bounds": (verifier(stages=0), "settings.verifier.stages: Must be greater than or equal to 1"),
    "a setting of another type": (verifier(threads="many"), "settings.verifier.threads: Invalid type. Expected: .integer,null., given: string"),
    "a type that does not exist": (verifier(dtype="float16"), "settings.verifier.dtype: .* must be one of .*bfloat16"),
    "what the chart decides": ({"settings": {"server": {"keys_file": "/x"}}}, "settings.server: .* keys_file is not allowed"),
    "where the chart keeps things": ({"settings": {"cache_dir": "/x"}}, "settings: Additional property cache_dir"),
    "no HTTP as a setting": ({"settings": {"server": {"http_port": None}}}, "settings.server.http_port: Invalid type"),
    "metrics without Ray's agents": ({"settings": {"metrics": {"export": "prometheus"}}}, "settings.metrics.export"),
    "a token in the values": ({"settings": {"internal_token": "x" * 32}}, "settings: Additional property internal_token"),
    "a password in a URL": (
        {"settings": {"retrieval": {"redis_url": "redis://:secret@redis:6379"}}},
        "settings.retrieval.redis_url: Does not match pattern",
    ),
    "a secret in the environment": (
        group("router", env={"HF_TOKEN": "hf_x"}), 'groups.router.env: Property name of "HF_TOKEN" does not match',
    ),
    "a setting in the environment": (
        group("verifier", env={"OUTRIDER_VERIFIER__STAGES": "2"}),
        'groups.verifier.env: Property name of "OUTRIDER_VERIFIER__STAGES" does not match',
    ),
    "an image that changes": ({"image": {"tag": "latest"}}, "image.tag: Must not validate the schema"),
    "a digest cut short": ({"image": {"digest": "sha256:abc"}}, "image.digest: Does not match pattern"),
    "a name that is no name": ({"apiKeys": {"secretName": "My Keys"}}, "apiKeys.secretName: Does not match pattern"),
    "a name too long": ({"fullnameOverride": "o" * 41}, "fullnameOverride: String length must be less than or equal to 40"),
    "Redis without a password": ({"redis": {"enabled": True}}, "redis.passwordSecretName: String length must be greater"),
    "an index in no Redis": ({"redis": {"index": True}}, "redis.enabled"),
    "a control store in no Redis": (
        {"ray": {"gcsFaultTolerance": {"enabled": True}}}, "ray.gcsFaultTolerance.redisAddress: String length must be greater",
    ),
    "half of mutual TLS": ({"componentTls": {"verifier": "v"}}, "componentTls.drafter: String length must be greater"),
    "a certificate for no secret": (
        {"certificates": {"public": {"enabled": True, "issuer": {"name": "acme"}, "dnsNames": ["a.example.com"]}}},
        "tls.secretName: String length must be greater",
    ),
    "a certificate of nobody": (
        {"tls": {"secretName": "tls"}, "certificates": {"public": {"enabled": True, "dnsNames": ["a.example.com"]}}},
        "certificates.public.issuer.name: String length must be greater",
    ),
    "a certificate for no host": (
        {"tls": {"secretName": "tls"}, "certificates": {"public": {"enabled": True, "issuer": {"name": "acme"}}}},
        "certificates.public.dnsNames: Array must have at least 1 items",
    ),
    "certificates of components without mutual TLS": (
        {"certificates": {"components": {"enabled": True, "issuer": {"name": "ours"}}}},
        "componentTls.verifier: String length must be greater",
    ),
    "a certificate that is renewed after its end": (
        {"certificates": {"components": {"renewBefore": "2160h"}}},
        "certificates.components.renewBefore is 2160h: must be shorter than certificates.components.duration, 2160h",
    ),
    "Ray's time apart from the pods'": (
        group("verifier", env={"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "5"}),
        'groups.verifier.env: Property name of "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" does not match',
    ),
    "an amount with a foreign unit": (group("verifier", memory="8GB"), "groups.verifier.memory: Does not match pattern"),
    "GPUs in words": (group("verifier", gpus="eight"), "groups.verifier.gpus: Invalid type. Expected: integer"),
    "a capability beyond RDMA's": (group("verifier", capabilities=["SYS_ADMIN"]), "groups.verifier.capabilities.0"),
    "a mode that volumes do not have": ({"storage": {"accessMode": "ReadWriteAll"}}, "storage.accessMode"),
    "a mount over the system": ({"storage": {"mountPath": "/etc"}}, "storage.mountPath: Does not match pattern"),
    "a port that there is not": ({"service": {"grpcPort": 70000}}, "service.grpcPort: Must be less than or equal to 65535"),
    "an Ingress for no host": ({"ingress": {"enabled": True}}, "ingress.host: String length must be greater"),
    "routes of no gateway": ({"gateway": {"enabled": True}}, "gateway.parentRefs: Array must have at least 1 items"),
    "everybody as a client": ({"networkPolicy": {"clients": [{}]}}, "networkPolicy.clients.0: Must have at least 1 properties"),
    "an upgrade that KubeRay cannot make": ({"upgrade": {"type": "Rolling"}}, "upgrade.type"),
    "a strategy that there is not": ({"tests": {"strategy": "magic"}}, "tests.strategy: .* must be one of"),
}  # fmt: skip
# Values, and what `outrider plan` says of them with a copy of a model of two layers.
BY_PLAN: dict[str, tuple[dict[str, Any], str]] = {
    "more stages than layers": (verifier(stages=3), "verifier.stages is 3: the model has 2 layers, so 1 to 2 are possible"),
    "GPUs that do not divide": (
        verifier(**GPU, stages=2) | group("verifier", gpus=3),
        r"groups.verifier.gpus is 3: a verifier takes 2 \(settings.verifier.stages 2 x num_gpus 1\), so must be a multiple of 2",
    ),
    "GPUs of several nodes that do not divide": (
        verifier(device="cuda", num_gpus=3, stages=2) | group("verifier", gpus=4),
        r"groups.verifier.gpus is 4: a verifier takes 6 .*, so must divide 6, in whole stages, or be a multiple of it",
    ),
    "a driver older than the image's CUDA": (
        verifier(**GPU) | group("verifier", gpus=1, gpuDriver="570.148.08"),
        "groups.verifier.gpuDriver is 570.148.08: the image's CUDA 13.0 needs 580 or later",
    ),
    "a GPU model without GPUs": (verifier(**GPU), "groups.verifier.gpus is 0: settings.verifier.device is cuda"),
    "GPUs for a CPU": (group("verifier", gpus=1), "groups.verifier.gpus is 1: settings.verifier.device is cpu"),
    "GPUs that nobody asks for": (
        verifier(device="cuda") | group("verifier", gpus=1), "settings.verifier.num_gpus is 0: Ray gives",
    ),
    "a drafter's GPU that is not there": (
        {"settings": {"drafter": {"device": "cuda", "num_gpus": 1}}}, "groups.drafting.gpus is 0: settings.drafter.device is cuda",
    ),
    "a volume too small for the model": (
        {"storage": {"size": "100k"}}, "storage.size is 100k: the files of smollm2-135m-instruct alone take 120 MiB",
    ),
    "a pod too small for the cache": (
        verifier(kv_cache_tokens=100_000_000),
        "groups.verifier.memory is 8Gi, 512Mi of it sharedMemory: the model does not fit: .* verifier.kv_cache_tokens: [0-9]+ would fit",
    ),
    "a GPU too small for the cache": (
        verifier(**GPU, kv_cache_tokens=1_000_000_000) | group("verifier", gpus=1, gpuMemory="80Gi"),
        "groups.verifier.gpuMemory is 80Gi: the model does not fit",
    ),
    "a pod too small for its router": (
        {"settings": {"router": {"num_cpus": 2}}, **group("router", cpu="500m")},
        r"groups.router.cpu is 500m: a router asks for 2 \(settings.router.num_cpus\)",
    ),
    "a pod too small for its stages": (
        verifier(stages=2, num_cpus=3), r"groups.verifier.cpu is 4: the verifiers or stages of one pod ask for 6",
    ),
    "more shared memory than memory": (
        group("drafting", sharedMemory="8Gi"), "groups.drafting.sharedMemory is 8Gi: .* groups.drafting.memory, 4Gi",
    ),
    "a model that no pod mounts": (
        {"settings": {"model": "/models/x"}}, r"settings.model is /models/x: the pods mount /var/lib/outrider \(storage.mountPath\)",
    ),
    "a drafter's model that no pod mounts": (
        {"settings": {"drafter": {"models": ["/x"]}}}, "settings.drafter.models is /x: the pods mount",
    ),
    "an audit log where nothing can be written": (
        {"settings": {"server": {"audit_log": "/var/log/x"}}}, "settings.server.audit_log is /var/log/x: must be stderr, or a file",
    ),
    "two servers on one port": (
        {"settings": {"server": {"http_port": 50051}}}, "server.http_port is 50051, as server.port: gRPC and HTTP need a port each",
    ),
    "an index without certificates": (
        {"componentTls": {"verifier": "v", "drafter": "d"}, "indexRedis": {"urlSecretName": "x"}}, "componentTls.retrieval is empty",
    ),
    "states of no index": ({"settings": {"retrieval": {"semantic": True}}}, "retrieval.semantic is true, but there is no index"),
    "a strategy without an index": ({"settings": {"router": {"strategy": "rest"}}}, "router.strategy is rest, which needs"),
    "a rule that trusts whom it does not": (
        {"settings": {"router": {"acceptance": "rejection"}, "drafter": {"trusted": False}}}, "drafter.trusted is false",
    ),
    "two numbers of replicas": (verifier(replicas=2, autoscaling={"max_replicas": 3}), "verifier.replicas and autoscaling"),
    "bounds the wrong way round": (
        verifier(autoscaling={"min_replicas": 3, "max_replicas": 2}), "verifier.autoscaling.min_replicas is 3: must be at most",
    ),
    "longer texts than the model's": (
        verifier(max_model_len=100_000), "verifier.max_model_len is 100000: the model was made for at most 512 tokens",
    ),
    "longer texts than the cache": (
        verifier(max_model_len=500, kv_cache_tokens=128), "verifier.max_model_len is 500: verifier.kv_cache_tokens, 128, must not be below it",
    ),
}  # fmt: skip


def planned(values: dict[str, Any], copy: Path | None) -> tuple[str, ...]:
    """What `outrider plan --manifests` leaves unchecked."""
    over, offer = in_manifests(text(values), "-")
    return preflight_in_pods(load(over=over, environ={}), offer, copy).unchecked


def test_the_gallery_is_large() -> None:
    assert len(BY_SCHEMA) + len(BY_PLAN) >= 30


@pytest.mark.parametrize("what", BY_SCHEMA)
def test_helm_refuses(what: str) -> None:
    values, says = BY_SCHEMA[what]
    with pytest.raises(RefusedValues) as caught:
        render(values)
    assert re.search(says, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("what", BY_PLAN)
def test_the_plan_refuses(what: str, tiny_model: Path) -> None:
    values, says = BY_PLAN[what]
    with pytest.raises(ConfigurationError) as caught:
        planned(values, tiny_model)
    said = str(caught.value)
    assert "\n" not in said
    assert re.search(says, said), said


def test_a_release_whose_name_is_too_long() -> None:
    with pytest.raises(RefusedValues, match=r'makes "a{40}-outrider", 49 characters: .* set fullnameOverride'):
        render(release="a" * 40)
    assert render(release="a" * 40, fullnameOverride="short")


def test_the_command_says_it_in_one_line(tmp_path: Path, tiny_model: Path) -> None:
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text(text(verifier(stages=3)))
    right.write_text(text())
    command = [sys.executable, "-m", "cli", "plan", "--model", str(tiny_model), "--manifests"]
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "verifier.stages is 3" in done.stderr
    done = subprocess.run([*command, "-"], input=right.read_text(), capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "outrider_verifier" in done.stdout and "models are kept in /var/lib/outrider" in done.stdout
    done = subprocess.run([*command, "-"], input="a: b", capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert "holds 0 ConfigMaps with outrider.yaml and pods.yaml" in done.stderr
