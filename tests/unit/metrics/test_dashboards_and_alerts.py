"""Dashboards and alert rules speak of metrics that exist, with labels that they have, in queries that Prometheus can read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.metrics.families import FAMILIES, PREFIX, Family
from tests.servers.promtool import needs_promtool, promtool

PLACE = Path(__file__).parents[3] / "k8s" / "outrider"
DASHBOARDS = sorted((PLACE / "dashboards").glob("*.json"))
RULES = PLACE / "alerts" / "outrider.yaml"
# Told when a feature is used, which need not be shown anywhere.
_BY = re.compile(r"\b(?:by|on|ignoring|group_left) ?\(([^()]*)\)")
_NAME = re.compile(rf"\b{PREFIX}(\w+)")


def dashboard(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def expressions(path: Path) -> list[str]:
    """Every query of a dashboard."""
    return [target["expr"] for panel in dashboard(path)["panels"] for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def families_in(expression: str) -> list[Family]:
    """The metrics that a query names; an assertion if one does not exist, or has no such series."""
    found = []
    for name in _NAME.findall(expression):
        bare = re.sub(r"_(bucket|sum|count)$", "", name)
        family = FAMILIES.get(name) or FAMILIES.get(bare)
        assert family is not None, f"{name} does not exist"
        assert (name != bare) == (family.kind == "histogram"), f"{name}: {family.kind}s have no such series"
        found.append(family)
    return found


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_show_what_exists(path: Path) -> None:
    queries = expressions(path)
    assert len(queries) >= 8
    for query in queries:
        families = families_in(query)
        assert families, query
        assert query.count("${prefix}" + PREFIX) == len(families), "works on Ray and without"
        # Prometheus adds the pod.
        labels = {label for family in families for label in family.labels} | {"le", "pod"}
        for named in _BY.findall(query):
            assert set(re.findall(r"\w+", named)) <= labels, query
        # Counters are shown as rates, which a restart does not break.
        for family in families:
            if family.kind != "gauge" and "lossless" not in query:
                assert "$__rate_interval" in query, query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_dashboards_fit_grafana(path: Path) -> None:
    content = dashboard(path)
    assert content["uid"] == f"outrider-{path.stem}"
    assert {variable["name"] for variable in content["templating"]["list"]} == {
        "datasource",
        "prefix",
        "namespace",
        "release",
    }
    taken: set[tuple[int, int]] = set()
    for panel in content["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in content["panels"]]
    assert len(ids) == len(set(ids))
    assert [panel["title"] for panel in content["panels"] if panel["type"] != "row" and not panel["description"]] == []


# Counters of these begin with the first such event: a panel of their sum would say "no data" until then, instead of 0.
_RARE = ("errors?", "failures", "misses", "missed", "late", "malformed", "preemptions", "switches")


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_what_has_never_happened_is_zero(path: Path) -> None:
    for query in expressions(path):
        if " by " not in query and "histogram" not in query and re.search(rf"_({'|'.join(_RARE)})_total", query):
            assert "or vector(0)" in query, query


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_query_is_of_the_chosen_release(path: Path) -> None:
    for query in expressions(path):
        chosen = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"}'
        assert query.count(chosen) == query.count("${prefix}"), query


def test_no_metric_is_forgotten() -> None:
    shown = {family.name for path in DASHBOARDS for query in expressions(path) for family in families_in(query)}
    assert set(FAMILIES) - shown == {"request_inference_time_seconds"}


def test_rules_speak_of_what_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) >= 10
    for rule in rules():
        query = rule["expr"]
        families = families_in(query)
        assert query.count('__name__=~"(ray_)?' + PREFIX) == len(families), "works on Ray and without"
        named = set(re.findall(r"outrider:[\w:]+", query))
        assert named <= recorded
        assert families or named
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "warning", "info")
        assert {"summary", "description"} <= set(rule["annotations"])


def test_every_alert_is_tried() -> None:
    tests = yaml.safe_load((RULES.parent / "outrider_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


@needs_promtool
def test_promtool_reads_and_tries_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(RULES.parent / "outrider_test.yaml"))


@needs_promtool
@pytest.mark.parametrize("prefix", ["", "ray_"])
def test_promtool_reads_every_query(prefix: str, tmp_path: Path) -> None:
    queries = [query for path in DASHBOARDS for query in expressions(path)]
    filled = [query.replace("${prefix}", prefix).replace("$__rate_interval", "5m") for query in queries]
    made = [{"record": f"shown:{number}", "expr": query} for number, query in enumerate(filled)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": made}]}))
    assert f"{len(made)} rules found" in promtool("check", "rules", str(file))
