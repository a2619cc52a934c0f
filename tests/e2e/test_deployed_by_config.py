"""The service deployed as `serve deploy` and RayService do, from an import path and settings.

Its verifiers follow the load. Deployed anew with other settings, its one router on a named port is replaced: the next one listens
while the old one still drains.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from outrider import Client, Retry
from tests.running.ports import free_port
from tests.servers.checked_load import Load, plain_answers, wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

# What the REST interface does with the file that `serve deploy` sends it: each that comes on a line is deployed, and the answer is the
# router's process. A line "verifiers" asks how many there are.
_HOST = """
import json, os, sys, time
from cluster.process.starting import begin_starting
begin_starting()
from cluster.ray.on_ray import ENVIRONMENT
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("RAY_AUTH_TOKEN", "of this test alone" * 2)
import ray
from cluster.ray.starting import wait_until_running
from ray import serve
ray.init(address="local", include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", num_cpus=4)
serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
for line in sys.stdin:
    if line == "verifiers\\n":
        states = serve.status().applications["outrider"].deployments["verifier"].replica_states
        print(json.dumps({str(getattr(state, "value", state)): count for state, count in states.items()}), flush=True)
        continue
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(json.loads(line)))
    time.sleep(1)
    wait_until_running("outrider")
    print(serve.get_deployment_handle("router", "outrider").process_id.remote().result(), flush=True)
serve.shutdown()
ray.shutdown()
"""


class Deployed:
    """A Ray in a process of its own, with the service that was deployed on it last."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        self.address = f"127.0.0.1:{settings['server']['port']}"
        self.router = self.deploy("suffix")

    def deploy(self, strategy: str) -> int:
        """Deploy it with this default; its router's process once it runs."""
        args = self._settings | {"router": {"num_cpus": 0.1, "strategy": strategy}}
        application = {"name": "outrider", "import_path": "cluster.app:build", "route_prefix": None, "args": args}
        return int(self._ask(json.dumps({"proxy_location": "Disabled", "applications": [application]})))

    def verifiers(self) -> dict[str, int]:
        """How many there are in each of Serve's states."""
        counts: dict[str, int] = json.loads(self._ask("verifiers"))
        return counts

    def _ask(self, line: str) -> str:
        self._in.write(line + "\n")
        self._in.flush()
        answer = self._out.readline()
        assert answer, "it has ended"
        return answer

    def stop(self) -> None:
        self._in.close()
        self._process.wait(240)
        self._out.close()


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    scaling = {"max_replicas": 3, "upscale_delay_s": 0, "downscale_delay_s": 2, "look_back_period_s": 2}
    running = Deployed({
        "model": str(tiny_model),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
        "server": {"port": free_port(), "http_port": free_port(), "ops_port": free_port(), "drain_delay_s": 5},
        "drafter": {"num_cpus": 0.1, "keep_calibration": False},
        "verifier": {
            "max_model_len": 512, "kv_cache_tokens": 4096, "threads": 1, "budget": "fixed", "num_cpus": 0.1,
            "max_num_seqs": 4, "drain_s": 1, "autoscaling": scaling,
        },
    })  # fmt: skip
    yield running
    running.stop()


def test_verifiers_come_and_go_with_the_load_and_no_stream_is_lost(service: Deployed) -> None:
    expected = plain_answers(service.address)
    assert service.verifiers() == {"RUNNING": 1}
    load = Load(service.address, expected, clients=8, pause_s=0)
    try:
        wait_until(lambda: service.verifiers().get("RUNNING", 0) == 3, every_s=1)
    finally:
        load.stop()
    # One client alone keeps no three verifiers busy; its streams move when theirs goes.
    rest = Load(service.address, expected, clients=1)
    try:
        wait_until(lambda: service.verifiers() == {"RUNNING": 1}, every_s=1)
    finally:
        rest.stop()
    assert rest.answers > 0
    assert not load.failures + rest.failures


def test_a_single_router_is_replaced_on_its_port(service: Deployed) -> None:
    over, answers = threading.Event(), []

    def ask() -> None:
        with Client(service.address, retry=Retry(attempts=20, first_delay_s=0.2)) as client:
            while not over.wait(0.1):
                answers.append(client.generate("fox", max_tokens=8, ignore_eos=True, seed=5))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        second = service.deploy("recycling")
    finally:
        over.set()
        asking.join()
    assert service.router != second
    assert len({answer.text for answer in answers}) == 1 and len(answers) > 1
    with Client(service.address) as client:
        assert client.generate("fox", max_tokens=8).speculative_decoding.strategy == "recycling"
