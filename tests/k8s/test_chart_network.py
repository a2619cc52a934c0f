"""Who reaches whom in every rendering: services, ports and network policies."""

from __future__ import annotations

from typing import Any

from cluster.checks.listeners import listeners
from cluster.settings.config import load
from tests.k8s.chart import Manifest, needs_helm, of_kind, one, settings
from tests.k8s.test_chart_invariants import labels, ports, selected, templates

pytestmark = needs_helm


def test_services_reach_routers_and_nothing_else(made: list[Manifest]) -> None:
    found = templates(made)
    whole, headless = one(made, "Service", "outrider"), one(made, "Service", "-headless")
    assert headless["spec"]["clusterIP"] == "None"
    for service in (whole, headless):
        hit = [name for name, each in found.items() if selected({"matchLabels": service["spec"]["selector"]}, labels(each))]
        assert hit == ["router"]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports(found["router"])
            # Who dials pods by the headless name dials their ports.
            if service is headless:
                assert port["port"] == ports(found["router"])[port["targetPort"]]
    test = one(made, "Pod")
    assert not selected({"matchLabels": whole["spec"]["selector"]}, labels(test))
    for budget in of_kind(made, "PodDisruptionBudget"):
        hit = [name for name, each in found.items() if selected(budget["spec"]["selector"], labels(each))]
        assert len(hit) == 1 and budget["metadata"]["name"].endswith(hit[0])
        assert "minAvailable" not in budget["spec"]


def test_settings_listen_on_the_ports_that_pods_name(made: list[Manifest]) -> None:
    known = load(over=settings(made), environ={})
    named = ports(templates(made)["router"])
    fixed = {each.name: each.port for each in listeners(known) if each.port is not None}
    assert fixed == {name: port for name, port in named.items() if name != "metrics"}


def allowed(made: list[Manifest], group: str, caller: dict[str, str] | None = None, *, monitoring: bool = False) -> set[str]:
    """Names of a group's ports that some caller may reach: pods with these labels, or the monitoring's namespace."""
    target = templates(made)[group]
    found: set[str] = set()
    for policy in of_kind(made, "NetworkPolicy"):
        if not selected(policy["spec"]["podSelector"], labels(target)):
            continue
        assert "Ingress" in policy["spec"]["policyTypes"]
        for rule in policy["spec"]["ingress"]:
            for peer in rule["from"]:
                from_pods = caller is not None and "namespaceSelector" not in peer and selected(peer["podSelector"], caller)
                name = (peer.get("namespaceSelector") or {}).get("matchLabels", {}).get("kubernetes.io/metadata.name")
                if from_pods or (monitoring and name == "monitoring"):
                    found |= {port["port"] for port in rule["ports"]} if "ports" in rule else set(ports(target)) | {"any"}
    return found


def test_policies_cover_every_port_that_the_plan_lists(made: list[Manifest]) -> None:
    known, found = load(over=settings(made), environ={}), templates(made)
    home = {"router": "router", "drafter": "drafting", "retrieval": "drafting", "verifier": "verifier"}
    callers = {"drafts": "verifier", "lookups": "drafting", "stages": "verifier"}
    for each in listeners(known):
        group = home[each.component]
        if each.callers == "components":
            assert "any" in allowed(made, group, labels(found[callers[each.name]])), each
        elif each.callers == "operators":
            assert each.name in allowed(made, group, monitoring=True), each
        # The test's pod asks as clients do.
        assert each.callers != "clients" or each.name in allowed(made, group, labels(one(made, "Pod"))), each


def test_nobody_else_reaches_anything(made: list[Manifest]) -> None:
    stranger = {"app": "stranger"}
    public = {"grpc", "http"} & set(ports(templates(made)["router"]))
    open_to_neighbours = any("podSelector" in peer and not peer["podSelector"] for peer in _clients(made))
    assert allowed(made, "router", stranger) == (public if open_to_neighbours else set())
    for group in ("head", "drafting", "verifier"):
        assert allowed(made, group, stranger) == set()
        assert allowed(made, group, monitoring=True) == {"metrics"}
    assert allowed(made, "router", monitoring=True) == {"metrics", "ops"}
    # Neither may the test, but for what clients and operators may.
    test = labels(one(made, "Pod"))
    assert allowed(made, "router", test) == public | {"ops"}
    assert allowed(made, "head", test) == set() == allowed(made, "verifier", test)


def test_the_operator_reaches_the_heads_dashboard_alone(made: list[Manifest]) -> None:
    (rule,) = one(made, "NetworkPolicy", "-head")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["dashboard"]
    assert ports(templates(made)["head"])["dashboard"] == 8265
    assert all(peer["namespaceSelector"]["matchLabels"] for peer in rule["from"])


def _clients(made: list[Manifest]) -> list[dict[str, Any]]:
    policy = one(made, "NetworkPolicy", "-router")
    found: list[dict[str, Any]] = policy["spec"]["ingress"][0]["from"]
    return found


def test_policies_bound_what_pods_reach(made: list[Manifest]) -> None:
    policies = of_kind(made, "NetworkPolicy")
    for group, template in templates(made).items():
        bounding = [
            each["spec"]
            for each in policies
            if "Egress" in each["spec"]["policyTypes"] and selected(each["spec"]["podSelector"], labels(template))
        ]
        assert bounding, group
        for rule in (rule for spec in bounding for rule in spec["egress"]):
            assert rule["to"]
            for peer in rule["to"]:
                if peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0":
                    assert group == "head"
                    assert peer["ipBlock"]["except"] == ["169.254.169.254/32"]
