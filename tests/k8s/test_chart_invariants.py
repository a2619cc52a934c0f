"""What must hold of every rendering: names, what is secret, what a container may, how it ends, what watches it."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from cluster.settings.config import load
from retrieval_index.access import PUBLISHER, READER, keeper_rules, rules
from services.links.tls.component_files import name_of
from tests.k8s.chart import Manifest, groups, needs_helm, of_kind, one, render, serve_config, settings, text
from tests.k8s.schemas import pod_templates
from tests.k8s.test_chart_valid import EVERYTHING
from tests.running.refusals import ROOT

pytestmark = needs_helm
WORKERS = ("router", "drafting", "verifier")
# Where Ray's agent tells its health, and its numbers.
AGENT, METRICS = 52365, 8080


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector selects."""
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def labels(template: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = template["metadata"]["labels"]
    return found


def ports(template: dict[str, Any]) -> dict[str, int]:
    """The ports of a pod by name; each is named once."""
    found = [port for container in template["spec"]["containers"] for port in container.get("ports", ())]
    names = Counter(port["name"] for port in found)
    assert max(names.values(), default=1) == 1
    assert all(len(name) <= 15 for name in names)
    return {port["name"]: port["containerPort"] for port in found}


def templates(made: list[Manifest]) -> dict[str, dict[str, Any]]:
    return {name: group["template"] for name, group in groups(made).items()}


def test_names_are_unique_and_short(made: list[Manifest]) -> None:
    names = Counter((each["kind"], each["metadata"]["name"]) for each in made)
    assert max(names.values()) == 1
    assert all(len(name) <= 63 and re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for _, name in names)


def test_every_group_has_probes_of_its_own(made: list[Manifest]) -> None:
    for name, template in templates(made).items():
        (container,) = template["spec"]["containers"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[kind]["httpGet"]
            if (name, kind) == ("router", "readinessProbe"):
                assert probe == {"path": "/ready", "port": "ops"}
            else:
                assert probe == {"path": "/api/healthz", "port": AGENT}
        # Whoever waits for a model is not restarted for it.
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 300
        assert ports(template)["metrics"] == METRICS
    assert "serve" in ports(templates(made)["head"]), "KubeRay refuses a head without it"


def containers(made: list[Manifest]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every container with its pod's specification and a name for messages."""
    return [
        (f"{manifest['kind']} {container['name']}", template["spec"], container)
        for manifest in made
        for template in pod_templates(manifest)
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])
    ]


def test_pods_satisfy_the_standard_called_restricted(made: list[Manifest]) -> None:
    for name, pod, container in containers(made):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"]["drop"] == ["ALL"]
        assert set(own["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        kinds = {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} if "volumes" in pod else set()
        assert kinds <= {"emptyDir", "configMap", "secret", "projected", "persistentVolumeClaim"}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert not container["image"].endswith(":latest") and re.search(r":[^/]+$|@sha256:", container["image"])
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        claimed = {each["metadata"]["name"] for each in _claims(made)}
        assert mounted <= {volume["name"] for volume in pod.get("volumes", ())} | claimed, name


def _claims(made: list[Manifest]) -> list[Manifest]:
    return [claim for each in of_kind(made, "StatefulSet") for claim in each["spec"]["volumeClaimTemplates"]]


def test_only_profiles_for_rdma_leave_the_standard(made: list[Manifest]) -> None:
    added = {name for name, _, container in containers(made) if "add" in container["securityContext"]["capabilities"]}
    values = {each["name"] for _, _, container in containers(made) for each in container.get("env", ())}
    assert not added or "NCCL_DEBUG" in values


def test_secrets_are_named_and_never_there() -> None:
    printed = text(EVERYTHING)
    made = render(EVERYTHING)
    assert not of_kind(made, "Secret")
    for name, _, container in containers(made):
        for variable in container.get("env", ()):
            if re.search(r"PASSWORD|TOKEN|KEY$", variable["name"]):
                assert "secretKeyRef" in variable.get("valueFrom", {}), name
    assert not re.findall(r"rediss?://[^ \n@]*:[^ \n]*@", printed)
    args = json.dumps(serve_config(made))
    assert "redis_url" not in args and '"internal_token"' not in args


def test_ray_asks_for_a_token(made: list[Manifest]) -> None:
    """Whoever reaches Ray's ports may run code in the pods: by default, too, only with a token, which KubeRay draws."""
    options = one(made, "RayService")["spec"]["rayClusterConfig"]["authOptions"]
    assert options["mode"] == "token"
    named = {volume for volume in options if volume != "mode"}
    assert named <= {"secretName"} and ("secretName" not in options or options["secretName"])


def test_without_a_secret_kuberay_draws_rays_token() -> None:
    cluster = one(render("cpu-demo"), "RayService")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    named = one(render("cpu-demo", ray__authSecretName="mine"), "RayService")["spec"]["rayClusterConfig"]
    assert named["authOptions"] == {"mode": "token", "secretName": "mine"}


def test_drafters_only_read_the_volume_of_the_models(made: list[Manifest]) -> None:
    found = templates(made)
    read_only = {}
    for name, template in found.items():
        (mount,) = (each for each in template["spec"]["containers"][0]["volumeMounts"] if each["name"] == "models")
        read_only[name] = mount.get("readOnly", False)
    assert read_only == {"head": False, "router": False, "drafting": True, "verifier": False}
    # What they write lies in their pod alone.
    known = load(over=settings(made), environ={})
    drafting = found["drafting"]["spec"]
    assert known.drafting_dir is not None
    (own,) = (
        each["name"]
        for each in drafting["containers"][0]["volumeMounts"]
        if known.drafting_dir.is_relative_to(each["mountPath"])
    )
    assert "emptyDir" in next(volume for volume in drafting["volumes"] if volume["name"] == own)


ANSWERS = {"retrieval": {"name": "code", "answers_tokens": 1000}, "drafter": {"suffix_cached_tokens": 1000}}


def test_the_indexs_redis_has_users_with_the_rules_of_the_package() -> None:
    made = render(EVERYTHING, {"settings": {"retrieval": {"name": "code"}}})
    (workload,) = of_kind(made, "StatefulSet")
    script = workload["spec"]["template"]["spec"]["containers"][0]["args"][0]
    for user, commands in (("reader", READER), ("publisher", PUBLISHER)):
        (line,) = (each for each in script.splitlines() if each.startswith(f"user {user} on "))
        assert line.endswith(f'")" {rules(commands, "code")}')
    # Where answers are kept, retrieval services may write those, and nothing else.
    keeping = render(EVERYTHING, {"settings": ANSWERS, "indexRedis": {"answersSecretName": "answers"}})
    (workload,) = of_kind(keeping, "StatefulSet")
    lines = workload["spec"]["template"]["spec"]["containers"][0]["args"][0].splitlines()
    (line,) = (each for each in lines if each.startswith("user reader on "))
    assert line.endswith(f'")" {rules(READER, "code")} {keeper_rules("code")}')
    told = {each["name"]: each for each in templates(keeping)["head"]["spec"]["containers"][0]["env"]}
    secret = {"name": "answers", "key": "answers"}
    assert told["OUTRIDER_RETRIEVAL__ANSWERS_KEY"]["valueFrom"]["secretKeyRef"] == secret
    # Retrieval services read with a password that opens nothing else, and only who has business there reaches it.
    head = templates(made)["head"]["spec"]["containers"][0]["env"]
    told = {each["name"]: each for each in head}
    assert told["OUTRIDER_RETRIEVAL__REDIS_URL"]["value"].startswith("redis://reader@")
    assert told["OUTRIDER_RETRIEVAL__REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "reader"}
    (rule,) = one(made, "NetworkPolicy", "-redis")["spec"]["ingress"]
    callers = [
        name
        for name, each in templates(made).items()
        if any(selected(peer["podSelector"], labels(each)) for peer in rule["from"])
    ]
    assert callers == ["head", "drafting"]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("responsesRedis", "OUTRIDER_SERVER__STORED_RESPONSES_REDIS_PASSWORD"),
        ("learningRedis", "OUTRIDER_ROUTER__LEARNING_REDIS_PASSWORD"),
    ],
)
def test_the_passwords_of_routers_reach_who_builds_the_application(value: str, name: str) -> None:
    made = templates(render(EVERYTHING, {value: {"passwordSecretName": "responses", "passwordSecretKey": "word"}}))
    told = {group: {each["name"]: each for each in pod["spec"]["containers"][0]["env"]} for group, pod in made.items()}
    assert told["head"][name]["valueFrom"]["secretKeyRef"] == {"name": "responses", "key": "word"}
    assert [group for group, env in told.items() if name in env] == ["head"]


def test_each_group_mounts_only_the_secrets_that_it_reads() -> None:
    found = {
        name: {volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume}
        for name, template in templates(render(EVERYTHING)).items()
    }
    assert found == {"head": {"token"}, "router": {"keys", "tls"}, "drafting": {"d", "r"}, "verifier": {"v"}}


def test_the_autoscaler_alone_gets_a_token_of_the_api_server() -> None:
    for values, scales in (("cpu-demo", False), ("eight-h100-tp8", True)):
        cluster = one(render(values), "RayService")["spec"]["rayClusterConfig"]
        (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
        assert "api-token" not in {mount["name"] for mount in head["volumeMounts"]}
        assert cluster.get("enableInTreeAutoscaling", False) is scales
        if scales:
            assert "api-token" in {mount["name"] for mount in cluster["autoscalerOptions"]["volumeMounts"]}


def test_components_are_pinned_to_their_groups(made: list[Manifest]) -> None:
    placement = load(over=settings(made), environ={}).cluster.placement
    offered = {name: group["resources"] for name, group in groups(made).items() if name != "head"}
    assert offered == {name: {f"outrider_{name}": "1000"} for name in WORKERS}
    assert (placement.router, placement.verifier) == ("outrider_router", "outrider_verifier")
    assert placement.drafter == placement.retrieval == "outrider_drafting"
    assert groups(made)["head"]["rayStartParams"]["num-cpus"] == "0"


def environment(template: Manifest) -> dict[str, str]:
    """What the first container of a pod is told in so many words."""
    return {each["name"]: each["value"] for each in template["spec"]["containers"][0]["env"] if "value" in each}


def test_ray_reads_how_long_to_drain() -> None:
    from ray._private import ray_constants

    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" in vars(ray_constants)


def test_time_to_drain_follows_the_settings() -> None:
    told = {"settings": {"server": {"drain_delay_s": 20, "drain_grace_s": 1000}, "verifier": {"drain_s": 500}}}
    made = render(told)
    test_pods_have_time_to_drain(made)
    assert environment(templates(made)["verifier"])["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "1035"
    long = render({"settings": {"server": {"drain_grace_s": 5}, "verifier": {"drain_s": 500}}})
    test_pods_have_time_to_drain(long)
    assert environment(templates(long)["verifier"])["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "520"


def test_pods_have_time_to_drain(made: list[Manifest]) -> None:
    known = load(over=settings(made), environ={})
    grace = {name: each["spec"]["terminationGracePeriodSeconds"] for name, each in templates(made).items()}
    streams = known.server.drain_delay_s + known.server.drain_grace_s
    assert grace["router"] > streams + 5
    assert grace["verifier"] > known.verifier.drain_s
    assert one(made, "RayService")["spec"]["rayClusterDeletionDelaySeconds"] > streams
    # A router's pod ends its streams before Ray is told to stop; those of the others need no such thing.
    hooks = {name: each["spec"]["containers"][0].get("lifecycle") for name, each in templates(made).items()}
    assert [name for name, hook in hooks.items() if hook] == ["router"]
    command = hooks["router"]["preStop"]["exec"]["command"]
    assert command[:2] == ["outrider", "leave"]
    assert streams < float(command[command.index("--timeout") + 1]) < grace["router"]
    assert command[command.index("--name") + 1] == known.cluster.name
    # Ray, told to stop after that, moves what else runs there, and the kubelet waits for it.
    drain = {
        name: float(environment(each)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) for name, each in templates(made).items()
    }
    leave = {name: float(command[command.index("--timeout") + 1]) if name == "router" else 0.0 for name in drain}
    assert all(leave[name] + drain[name] < grace[name] for name in grace)
    assert drain["verifier"] > known.verifier.drain_s
    # Where all pods go at once, what the routers' streams need lasts as long as they may.
    assert drain["head"] >= leave["router"] and drain["verifier"] >= leave["router"]
    # A balancer's two probes notice before calls are refused.
    probe = templates(made)["router"]["spec"]["containers"][0]["readinessProbe"]
    assert known.server.drain_delay_s >= probe["periodSeconds"] * probe["failureThreshold"]


def test_certificates_are_for_the_secrets_that_are_mounted() -> None:
    made = render(EVERYTHING)
    asked = {each["spec"]["secretName"]: each["spec"] for each in of_kind(made, "Certificate")}
    roles = EVERYTHING["componentTls"]
    assert {secret: asked[secret]["dnsNames"] for secret in roles.values()} == {
        secret: [name_of(role)] for role, secret in roles.items()
    }
    # Components are clients of each other as well as servers.
    assert all({"server auth", "client auth"} <= set(asked[secret]["usages"]) for secret in roles.values())
    assert asked["tls"]["dnsNames"] == ["a.example.com"] and "client auth" not in asked["tls"]["usages"]
    assert asked["tls"]["issuerRef"] == {"name": "acme", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    assert set(asked) == {"tls", *roles.values()}
    assert not of_kind(render("locked-down"), "Certificate")


def test_two_releases_in_one_namespace_keep_apart() -> None:
    first, second = render(EVERYTHING, release="red"), render(EVERYTHING, release="blue")
    names = [{(each["kind"], each["metadata"]["name"]) for each in made} for made in (first, second)]
    assert not names[0] & names[1]
    for mine, other in ((first, second), (second, first)):
        strangers = [template for manifest in other for template in pod_templates(manifest)]
        for policy in of_kind(mine, "NetworkPolicy"):
            peers = [peer for rule in policy["spec"].get("ingress", ()) for peer in rule["from"]]
            ours = [peer["podSelector"] for peer in peers if peer.get("podSelector")]
            for template in strangers:
                assert not any(selected(each, labels(template)) for each in (*ours, policy["spec"]["podSelector"]))
        for each in (*of_kind(mine, "Service"), *of_kind(mine, "PodDisruptionBudget"), *of_kind(mine, "PodMonitor")):
            wanted = each["spec"]["selector"]
            wanted = {"matchLabels": wanted} if each["kind"] == "Service" else wanted
            assert not any(selected(wanted, labels(template)) for template in strangers)


def test_alerts_lead_to_what_is_written_of_them() -> None:
    address = "https://docs.example/kubernetes/"
    rule = {"enabled": True, "runbooks": address}
    made = one(render({"monitoring": {"prometheusRule": rule}}), "PrometheusRule")["spec"]
    alerts = [each for group in made["groups"] for each in group["rules"] if "alert" in each]
    sections = re.findall(r"^### (Outrider\w+)$", (ROOT / "docs" / "kubernetes.md").read_text(), re.MULTILINE)
    assert [each["annotations"].pop("runbook_url") for each in alerts] == [f"{address}#{each.lower()}" for each in sections]
    plain = one(render({"monitoring": {"prometheusRule": {"enabled": True}}}), "PrometheusRule")["spec"]
    assert made == plain


def test_monitoring_is_what_the_repository_has() -> None:
    import yaml

    from tests.k8s.chart import CHART

    made = render(EVERYTHING)
    assert one(made, "PrometheusRule")["spec"] == yaml.safe_load((CHART / "alerts" / "outrider.yaml").read_text())
    boards = [each for each in of_kind(made, "ConfigMap") if "-dashboard-" in each["metadata"]["name"]]
    files = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert {name: json.loads(content) for each in boards for name, content in each["data"].items()} == {
        f"outrider-{name}": json.loads(content) for name, content in files.items()
    }
    monitor = one(made, "PodMonitor")["spec"]
    assert all(selected(monitor["selector"], labels(each)) for each in templates(made).values())
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == ["metrics"]
