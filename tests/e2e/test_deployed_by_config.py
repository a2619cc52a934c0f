"""The service deployed as `serve deploy` and RayService do, from an import path and settings; its verifiers follow the load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.checked_load import Load, plain_answers, wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

# What the REST interface does with the file that `serve deploy` sends it. Afterwards it tells how many verifiers there are.
_HOST = """
import json, os, sys, time
from cluster.ray.on_ray import ENVIRONMENT
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("RAY_AUTH_TOKEN", "of this test alone" * 2)
import ray
from ray import serve
ray.init(address="local", include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", num_cpus=4)
serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(json.loads(sys.argv[1])))
while (status := serve.status().applications["outrider"].status) != "RUNNING":
    assert status == "DEPLOYING", serve.status()
    time.sleep(0.2)
print(json.dumps(serve.get_app_handle("outrider").addresses.remote().result().grpc), flush=True)
for line in sys.stdin:
    states = serve.status().applications["outrider"].deployments["verifier"].replica_states
    print(json.dumps({str(getattr(state, "value", state)): count for state, count in states.items()}), flush=True)
serve.shutdown()
ray.shutdown()
"""


class Deployed:
    def __init__(self, config: dict[str, object]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        line = self._out.readline()
        assert line, "it did not start"
        self.address: str = json.loads(line)

    def verifiers(self) -> dict[str, int]:
        """How many there are in each of Serve's states."""
        self._in.write("verifiers\n")
        self._in.flush()
        counts: dict[str, int] = json.loads(self._out.readline())
        return counts

    def stop(self) -> None:
        self._in.close()
        self._process.wait(240)
        self._out.close()


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    scaling = {"max_replicas": 3, "upscale_delay_s": 0, "downscale_delay_s": 2, "look_back_period_s": 2}
    settings = {
        "model": str(tiny_model),
        "cache_dir": str(tmp_path_factory.mktemp("cache")),
        "server": {"port": 0},
        "router": {"num_cpus": 0.1},
        "drafter": {"num_cpus": 0.1, "keep_calibration": False},
        "verifier": {
            "max_model_len": 512, "kv_cache_tokens": 4096, "threads": 1, "budget": "fixed", "num_cpus": 0.1,
            "max_num_seqs": 4, "drain_s": 1, "autoscaling": scaling,
        },
    }  # fmt: skip
    application = {"name": "outrider", "import_path": "cluster.app:build", "route_prefix": None, "args": settings}
    running = Deployed({"proxy_location": "Disabled", "applications": [application]})
    yield running
    running.stop()


def test_verifiers_come_and_go_with_the_load_and_no_stream_is_lost(service: Deployed) -> None:
    expected = plain_answers(service.address)
    assert service.verifiers() == {"RUNNING": 1}
    load = Load(service.address, expected, clients=8, pause_s=0)
    try:
        wait_until(lambda: service.verifiers().get("RUNNING", 0) == 3)
    finally:
        load.stop()
    # One client alone keeps no three verifiers busy; its streams move when theirs goes.
    rest = Load(service.address, expected, clients=1)
    try:
        wait_until(lambda: service.verifiers() == {"RUNNING": 1})
    finally:
        rest.stop()
    assert rest.answers > 0
    assert not load.failures + rest.failures
