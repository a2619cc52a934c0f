"""A Ray of several nodes on this machine, each started as KubeRay starts a pod of one of the chart's groups.

What a pod is given is taken from the manifests: cores and GPUs of its limits, its custom resources, its environment, Ray's token.
GPUs are numbers to Ray alone: it hands them out though none is here, and the models run on the processor.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.running.ports import free_port

RAY = Path(sys.executable).parent / "ray"
_PATIENCE_S, _ATTEMPTS = 180, 3


def _own_address(number: int) -> str:
    """Of a pod. Ray would replace 127.0.0.1 by an address that others reach."""
    return f"127.0.0.{2 + number}"


class Pod:
    """One node of Ray.

    Args:
        address: its own.
        probe: what the kubelet asks.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], address: str, probe: str, log: Path) -> None:
        self.address, self._probe = address, probe
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)

    def healthy(self) -> bool:
        """What the kubelet's probe of a worker finds."""
        return asked(self._probe) == 200

    def terminate(self) -> None:
        """As the kubelet does; does not wait."""
        self.process.send_signal(signal.SIGTERM)

    def said(self) -> str:
        return self._log.read_text()


def asked(url: str) -> int | None:
    """The status of a GET; None where nothing answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


class RayOfGroups:
    """A head and its workers, with the interface that KubeRay's operator uses."""

    def __init__(self, head: Mapping[str, Any], token: str, **head_environment: str) -> None:
        # Ray's sockets lie in it: their paths may not be long.
        self.folder = Path(tempfile.mkdtemp(prefix="or-", dir="/tmp"))
        self._token = token
        self._dashboard, port = free_port(), free_port()
        self.address = f"{_own_address(0)}:{port}"
        self.pods: list[tuple[str, Pod]] = []
        self._started: list[Pod] = []
        self._own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_TMPDIR": str(self.folder)}
        # On a node, a pod's workers share its cores with nobody; here they would give way to all other tests.
        self._own["RAY_worker_niceness"] = "0"
        flags = {
            "--head": "", "--port": str(port), "--dashboard-host": "127.0.0.1", "--dashboard-port": str(self._dashboard),
            "--ray-client-server-port": str(free_port()), "--include-dashboard": "true",
        }  # fmt: skip
        try:
            self._start("head", head, flags, head_environment)
            self._wait(lambda: asked(f"http://127.0.0.1:{self._dashboard}/api/version") in (200, 401))
        except BaseException:
            self.stop()
            raise

    def add(self, group: str, specification: Mapping[str, Any], **environment: str) -> Pod:
        """Start one more pod of a worker group."""
        return self._start(group, specification, {"--address": self.address}, environment)

    def environment(self) -> dict[str, str]:
        """What a command on this machine needs to join."""
        return {"RAY_ADDRESS": self.address, **self._own}

    def _start(self, group: str, given: Mapping[str, Any], flags: dict[str, str], environment: Mapping[str, str]) -> Pod:
        number, agent_port, own_address = len(self.pods) + 1, free_port(), _own_address(len(self.pods))
        (container,) = (each for each in given["template"]["spec"]["containers"] if each["name"].startswith("ray-"))
        limits, resources = container["resources"]["limits"], given.get("resources", {})
        gpus = sum(int(amount) for name, amount in limits.items() if name.startswith("nvidia.com/"))
        flags |= {
            "--num-cpus": given["rayStartParams"].get("num-cpus", str(limits["cpu"])),
            "--num-gpus": given["rayStartParams"].get("num-gpus", str(gpus)),
            "--resources": json.dumps({name: float(amount) for name, amount in resources.items()}),
            # What pods have for themselves: an address, and every port.
            "--node-ip-address": own_address, "--dashboard-agent-listen-port": str(agent_port),
            "--dashboard-agent-grpc-port": str(free_port()), "--metrics-export-port": str(free_port()),
            "--runtime-env-agent-port": str(free_port()), "--min-worker-port": "0", "--max-worker-port": "0",
            # Ray would believe that the whole machine is each one's own.
            "--object-store-memory": str(100 * 2**20), "--include-log-monitor": "false",
        }  # fmt: skip
        if "--head" in flags:
            flags |= {"--temp-dir": str(self.folder)}
        told = {each["name"]: each["value"] for each in container["env"] if "value" in each and each["name"] != "HOME"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OUTRIDER_"))}
        command = [str(RAY), "start", "--block"]
        command += [f"{flag}={value}" if value else flag for flag, value in flags.items()]
        probe = f"http://{own_address}:{agent_port}/api/healthz"
        environment = inherited | told | self._own | dict(environment)
        for attempt in range(_ATTEMPTS):
            pod = Pod(command, environment, own_address, probe, self.folder / f"{number}-{group}-{attempt}.log")
            self._started.append(pod)
            # One after the other, and again where one fails, as in a cluster: Ray gives each of them 30 s to start.
            self._wait(lambda: pod.healthy() or pod.process.poll() is not None)  # noqa: B023
            if pod.process.poll() is None:
                break
        else:
            raise AssertionError((group, pod.said()[-2000:]))
        self.pods.append((group, pod))
        return pod

    def bundles(self) -> list[list[str]]:
        """On which node each bundle of each placement group is."""
        groups = self._ask("GET", path="/api/v0/placement_groups?detail=true&limit=1000")["data"]["result"]["result"]
        created = [group for group in groups if group["state"] == "CREATED"]
        return [[bundle["node_id"] for bundle in group["bundles"]] for group in created]

    def deploy(self, config: Mapping[str, Any]) -> None:
        """As the operator does: hand over the RayService's serveConfigV2."""
        self._ask("PUT", config)

    def application(self) -> dict[str, Any]:
        """What Serve says of the application; empty while it says nothing."""
        found = self._ask("GET")["applications"].values()
        return next(iter(found), {})

    def wait_until_running(self) -> dict[str, Any]:
        """The application once it runs.

        Raises:
            AssertionError: it does not; holds what Serve says.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while (state := self.application()).get("status") != "RUNNING":
            why = {name: part["message"] for name, part in state.get("deployments", {}).items()}
            assert state.get("status") not in ("DEPLOY_FAILED", "UNHEALTHY"), (state.get("message"), why)
            assert time.monotonic() < deadline, (state.get("status"), state.get("message"), why)
            time.sleep(1)
        return state

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, [(group, pod.said()[-500:]) for group, pod in self.pods]
            time.sleep(0.3)

    def _ask(self, method: str, content: Any = None, path: str = "/api/serve/applications/") -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._dashboard}{path}",
            method=method,
            data=None if content is None else json.dumps(content).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method}: {error.code} {error.read().decode()[:2000]}") from error
        return json.loads(text) if text else None

    def stop(self) -> None:
        """End all nodes, the head last."""
        for pod in reversed(self._started):
            if pod.process.poll() is not None:
                continue
            below = psutil.Process(pod.process.pid).children(recursive=True)
            for process in (*below, pod.process):
                with suppress(psutil.Error, ProcessLookupError):
                    process.kill()
            pod.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
