"""A service with one router on a named port is deployed anew: the next router listens while the old one still drains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider import Client, Retry
from tests.ports import free_port

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

# Deploys each configuration that comes on a line, and says which process the router is once it runs.
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
router = None
for line in sys.stdin:
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate(json.loads(line)))
    time.sleep(1)
    while (status := serve.status().applications["outrider"].status) != "RUNNING":
        assert status == "DEPLOYING", serve.status()
        time.sleep(0.2)
    print(serve.get_deployment_handle("router", "outrider").process_id.remote().result(), flush=True)
serve.shutdown()
ray.shutdown()
"""


def test_a_single_router_is_replaced_on_its_port(tiny_model: Path, tmp_path: Path) -> None:
    port, http_port, ops_port = free_port(), free_port(), free_port()

    def config(strategy: str) -> str:
        settings = {
            "model": str(tiny_model), "cache_dir": str(tmp_path),
            "server": {"port": port, "http_port": http_port, "ops_port": ops_port, "drain_delay_s": 5},
            "router": {"num_cpus": 0.1, "strategy": strategy},
            "drafter": {"num_cpus": 0.1, "keep_calibration": False},
            "verifier": {
                "max_model_len": 512, "kv_cache_tokens": 4096, "threads": 1, "budget": "fixed", "num_cpus": 0.1, "drain_s": 1,
            },
        }  # fmt: skip
        application = {"name": "outrider", "import_path": "cluster.app:build", "route_prefix": None, "args": settings}
        return json.dumps({"proxy_location": "Disabled", "applications": [application]})

    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert host.stdin is not None and host.stdout is not None

    def deploy(strategy: str) -> str:
        host.stdin.write(config(strategy) + "\n")
        host.stdin.flush()
        return host.stdout.readline().strip()

    try:
        first, over, answers = deploy("suffix"), threading.Event(), []

        def ask() -> None:
            with Client(f"127.0.0.1:{port}", retry=Retry(attempts=20, first_delay_s=0.2)) as client:
                while not over.wait(0.1):
                    answers.append(client.generate("fox", max_tokens=8, ignore_eos=True, seed=5))

        asking = threading.Thread(target=ask)
        asking.start()
        second = deploy("recycling")
        over.set()
        asking.join()
        assert first and second and first != second
        assert len({answer.text for answer in answers}) == 1 and len(answers) > 1
        with Client(f"127.0.0.1:{port}") as client:
            assert client.generate("fox", max_tokens=8).speculative_decoding.strategy == "recycling"
    finally:
        host.stdin.close()
        host.wait(240)
        host.stdout.close()
