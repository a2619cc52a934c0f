"""What the chart makes is what Kubernetes and KubeRay take, down to every field."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.k8s.chart import CHART, PROFILES, helm, needs_helm, of_kind, render
from tests.k8s.kuberay_subset import CRD, FILE, FOLDER, subset
from tests.k8s.manifest_cases import CASES, EVERYTHING, mistyped
from tests.k8s.other_kinds import KINDS
from tests.k8s.schemas import check

pytestmark = needs_helm


@pytest.mark.examples(4)
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


def test_the_checks_find_what_is_wrong() -> None:
    made = render("cpu-demo")
    for wrong in mistyped(made):
        with pytest.raises(jsonschema.ValidationError):
            check(wrong)
    policy = of_kind(made, "NetworkPolicy")[0]
    policy["spec"]["ingres"] = []
    with pytest.raises(jsonschema.ValidationError, match="ingres"):
        check(policy)
    others = [each for each in render(EVERYTHING) if each["kind"] in KINDS]
    assert {each["kind"] for each in others} == set(KINDS)
    for each in others:
        each["spec"]["speck"] = 1
        with pytest.raises(jsonschema.ValidationError, match="speck"):
            check(each)


def test_the_schema_of_rayservice_is_fresh() -> None:
    if not (FOLDER / CRD).is_file():
        pytest.skip(f"{FOLDER} has no {CRD} of KubeRay (KUBERAY_CRDS names the folder)")
    assert subset(FOLDER) == FILE.read_text(encoding="utf-8")
    assert json.loads(FILE.read_text(encoding="utf-8"))["additionalProperties"] is False
