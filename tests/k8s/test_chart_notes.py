"""What `helm install` prints at the end: the secrets that must be there, and commands that fit the release."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.k8s.chart import CHART, helm, needs_helm, render
from tests.k8s.schemas import pod_templates

pytestmark = needs_helm

_MANIFEST = '{{ define "notes" }}%s{{ end }}\nkind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | quote }}\n'


def notes(profile: str, folder: Path, *sets: str) -> str:
    """The notes; helm prints them at an installation alone, so here they are part of a manifest."""
    chart = Path(shutil.copytree(CHART, folder / profile))
    file = chart / "templates" / "NOTES.txt"
    (chart / "templates" / "notes.yaml").write_text(_MANIFEST % file.read_text())
    file.unlink()
    made = yaml.safe_load_all(
        helm("template", "demo", str(chart), "-f", str(CHART / "profiles" / f"{profile}.yaml"), "-n", "ai", *sets)
    )
    (found,) = (each["text"] for each in made if each["kind"] == "Notes")
    return str(found)


def test_a_demo_is_asked_from_within(tmp_path: Path) -> None:
    said = notes("cpu-demo", tmp_path)
    assert 'kubectl exec -n ai svc/demo-outrider -c ray-worker -- outrider generate --max-tokens 32 "The capital' in said
    assert "kubectl wait -n ai --for=condition=Ready rayservice/demo-outrider" in said
    assert "secrets must be" not in said
    # Of a command that is to be typed, help would be no key.
    assert "-- outrider new-key --tenant me >> keys.yaml" in said and "--help" not in said
    assert "helm test demo -n ai --logs" in said


def test_with_keys_and_tls_it_is_asked_from_outside(tmp_path: Path) -> None:
    said = notes("locked-down", tmp_path)
    assert 'curl -N https://127.0.0.1:8000/v1/completions -H "Authorization: Bearer $KEY"' in said
    assert "kubectl exec" not in said


KEPT = {
    "indexRedis__answersSecretName": "answers",
    "responsesRedis__passwordSecretName": "responses",
    "learningRedis__passwordSecretName": "learning",
}


@pytest.mark.examples(5)
@pytest.mark.parametrize("more", [{}, KEPT], ids=["alone", "kept"])
@pytest.mark.parametrize("profile", ["one-h100", "multi-node", "locked-down"])
def test_every_secret_that_pods_wait_for_is_named(profile: str, more: dict[str, str], tmp_path: Path) -> None:
    said = notes(profile, tmp_path, *(f"--set={name.replace('__', '.')}={value}" for name, value in more.items()))
    wanted = set()
    for manifest in render(profile, **more):
        for template in pod_templates(manifest):
            pod = template["spec"]
            wanted |= {volume["secret"]["secretName"] for volume in pod.get("volumes", ()) if "secret" in volume}
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                sources = [each.get("valueFrom", {}).get("secretKeyRef") for each in container.get("env", ())]
                wanted |= {each["name"] for each in sources if each}
        if manifest["kind"] == "RayService":
            wanted |= {manifest["spec"]["rayClusterConfig"]["authOptions"]["secretName"]}
    assert wanted >= set(more.values())
    named = said[said.index("These secrets must be in ai") :].split("\n\n")[0]
    assert {line.split()[0] for line in named.splitlines()[1:]} == wanted


def test_secrets_that_cert_manager_makes_are_not_asked_for(tmp_path: Path) -> None:
    issuer = ["--set", "certificates.components.enabled=true,certificates.components.issuer.name=ours"]
    before, after = notes("locked-down", tmp_path / "before"), notes("locked-down", tmp_path / "after", *issuer)
    assert "for verifier.outrider.internal" in before and ".outrider.internal" not in after
    assert "with tls.crt, tls.key" in after
