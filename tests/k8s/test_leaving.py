"""What a router's pod runs before it stops, on a real Ray: open answers end, new calls go elsewhere, and no other router is touched."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider import Client
from outrider.errors import OutriderError
from tests.k8s.chart import groups, needs_helm
from tests.k8s.profiles_here import Mounts, deployable
from tests.k8s.ray_of_groups import RayOfGroups

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400), needs_helm]

ROOT = Path(__file__).parents[2]


def leave(ray: RayOfGroups, command: list[str], node_ip: str) -> subprocess.CompletedProcess[str]:
    """The pod's own command, as the kubelet would run it in the pod of this address."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = known | ray.environment() | {"POD_IP": node_ip}
    assert command[0] == "outrider"
    return subprocess.run(
        [sys.executable, "-m", "cli", *command[1:]], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_a_pod_leaves_without_losing_a_stream(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    service = deployable("cpu-demo", tiny_model, tmp_path_factory.mktemp("models"), Mounts(tmp_path_factory.mktemp("etc")))
    pods = groups(service.manifests)
    (container,) = pods["router"]["template"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert "POD_IP" in {each["name"] for each in container["env"]}
    ray = RayOfGroups(pods["head"], secrets.token_hex(32))
    try:
        for group in ("router", "drafting", "verifier"):
            ray.add(group, pods[group])
        ray.deploy(service.config)
        ray.wait_until_running()
        options = {"max_tokens": 400, "ignore_eos": True, "seed": 1}
        with Client(service.grpc) as client:
            expected = client.generate(token_ids=[40, 41, 42], **options).token_ids
            # The drafting pod: its node has no router.
            said = leave(ray, command, "127.0.0.4")
            assert (said.returncode, said.stderr) == (0, "0 routers of this node have ended\n")
            assert client.generate(token_ids=[40, 41, 42], **options).token_ids == expected

            begun, answers = threading.Event(), []

            def ask() -> None:
                with client.stream(token_ids=[40, 41, 42], **options) as stream:
                    tokens: list[int] = []
                    for chunk in stream:
                        tokens += chunk.token_ids
                        begun.set()
                    answers.append(tuple(tokens))

            asking = threading.Thread(target=ask)
            asking.start()
            assert begun.wait(60)
            said = leave(ray, command, "127.0.0.3")
            assert (said.returncode, said.stderr) == (0, "1 router of this node has ended\n")
            asking.join(60)
            assert answers == [expected]
            with pytest.raises(OutriderError):
                client.generate(token_ids=[40, 41, 42], timeout_s=3, **options)
    finally:
        ray.stop()
