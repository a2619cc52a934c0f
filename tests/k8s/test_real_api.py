"""Each profile, applied to Kubernetes' own API server with KubeRay's CustomResourceDefinitions: taken as it is, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.k8s import other_kinds
from tests.k8s.chart import Manifest, needs_helm, one, render
from tests.k8s.kuberay_subset import CRD, FOLDER, definition_in
from tests.k8s.manifest_cases import CASES, EVERYTHING, mistyped
from tests.k8s.real_api import ApiServer, RefusedObject, needs_api_server, refused_built_ins

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("real_api"),
    needs_helm,
    needs_api_server,
    pytest.mark.skipif(
        not (FOLDER / CRD).is_file(), reason=f"{FOLDER} has no {CRD} of KubeRay (KUBERAY_CRDS names the folder)"
    ),
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    running = ApiServer(tmp_path_factory.mktemp("api"))
    try:
        for file in sorted(FOLDER.glob("ray.io_*.yaml")):
            running.define(definition_in(file))
        for kind in other_kinds.KINDS:
            running.define(other_kinds.definition(kind))
        yield running
    finally:
        running.stop()


def ray_cluster(service: Manifest) -> Manifest:
    """What KubeRay's operator makes of a RayService."""
    return {
        "apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": f"{service['metadata']['name']}-abcde"},
        "spec": service["spec"]["rayClusterConfig"],
    }  # fmt: skip


def kept(sent: Any, found: Any) -> bool:
    """Whether ``found`` has all of ``sent``, and at most defaults beside it."""
    if isinstance(sent, dict):
        return all(name in found and kept(value, found[name]) for name, value in sent.items())
    if isinstance(sent, list):
        return len(sent) == len(found) and all(kept(*pair) for pair in zip(sent, found, strict=True))
    return bool(sent == found)


@pytest.mark.parametrize("values", CASES)
def test_the_server_takes_all_of_it(values: Any, api: ApiServer) -> None:
    made = render(values)
    service = one(made, "RayService")
    for sent in (service, ray_cluster(service)):
        assert kept(sent, api.apply(sent))
    assert not refused_built_ins(
        each for each in made if not api.knows(each) and "." not in each["apiVersion"].split("/")[0]
    )


def test_it_refuses_what_is_wrong(api: ApiServer) -> None:
    made = render("cpu-demo")
    wrong = mistyped(made)
    fields = ("serveConfig", "authOption", "rayStartParam", "replicas", "nodeSelektor", "readynessProbe")
    assert len(wrong) == len(fields)
    for manifest, field in zip(wrong, fields, strict=True):
        with pytest.raises(RefusedObject, match=field):
            api.apply(manifest)
    service = one(made, "Service", "outrider")
    service["spec"]["selektor"] = {}
    assert [said.split(": ", 1)[1] for said in refused_built_ins([service])] == [
        'strict decoding error: unknown field "spec.selektor"'
    ]


def test_it_refuses_a_wrong_field_of_others(api: ApiServer) -> None:
    made = [each for each in render(EVERYTHING) if each["kind"] in other_kinds.KINDS]
    assert {each["kind"] for each in made} == set(other_kinds.KINDS)
    for manifest in made:
        manifest["spec"]["speck"] = 1
        with pytest.raises(RefusedObject, match=r"spec\.speck"):
            api.apply(manifest)


def test_it_refuses_a_port_that_is_named_twice(api: ApiServer) -> None:
    """Schemas of fields cannot say it; the server's own lists do."""
    service = one(render("cpu-demo"), "RayService")
    ports = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    ports.append(ports[0])
    with pytest.raises(RefusedObject, match="duplicate"):
        api.apply(service)
