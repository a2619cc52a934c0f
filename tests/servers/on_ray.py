"""The service on a local Ray, in a process of its own, so that the tests themselves stay outside of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Runs the service and answers questions about it on stdin.
_HOST = """
import json, sys
from pathlib import Path
from cluster.process.starting import begin_starting
begin_starting()
from cluster.settings.config import load
from cluster.models.target import ResolvedModel
from cluster.ray.on_ray import running_on_ray

def told(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    if "timed out during startup" in str(error):
        print("TOO SLOW", flush=True)

sys.excepthook = told
settings = load(flags=json.loads(sys.argv[2]), environ={})
with running_on_ray(settings, ResolvedModel(name="tiny", path=Path(sys.argv[1]))) as addresses:
    from ray import serve
    print(json.dumps(addresses.grpc), flush=True)
    for line in sys.stdin:
        deployment, method, *more = line.split(maxsplit=2)
        if deployment == "redeploy":
            from cluster.ray.application import application
            from cluster.settings.recognition import with_token
            changed = with_token(load(flags=json.loads(sys.argv[2]) + json.loads(line.partition(" ")[2]), environ={}))
            model = ResolvedModel(name="tiny", path=Path(sys.argv[1]))
            serve.run_many([serve.RunTarget(target=application(changed, model), name="outrider", route_prefix=None)])
            print("true", flush=True)
            continue
        if deployment == "states":
            parts = serve.status().applications[method].deployments
            counts = {part: {str(getattr(s, "value", s)): n for s, n in parts[part].replica_states.items()} for part in parts}
            print(json.dumps(counts), flush=True)
            continue
        handle = serve.get_deployment_handle(deployment, "outrider")
        if more:
            answers = handle.broadcast(method).results(timeout_s=240, return_exceptions=True)
            answers = [answer for answer in answers if not isinstance(answer, BaseException)]
            print(json.dumps(answers), flush=True)
        else:
            print(json.dumps(getattr(handle, method).remote().result(timeout_s=240)), flush=True)
"""


_TOO_SLOW = "TOO SLOW\n"


class Service:
    """A service in a process of its own, on a Ray of its own unless ``ray`` has variables that name another one."""

    def __init__(
        self, folder: Path, flags: list[str], stderr: int | None = None, ray: Mapping[str, str] | None = None
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | dict(ray or {})
        # Ray gives up a node of its own that is not up in thirty seconds, which happens on busy machines.
        for _ in range(5):
            self.process = subprocess.Popen(
                [sys.executable, "-c", _HOST, str(folder), json.dumps(flags)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
            told = self._read()
            if told != _TOO_SLOW:
                break
            self.process.wait()
        self.address: str = told

    def ask(self, deployment: str, method: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{deployment} {method}\n")
        self.process.stdin.flush()
        return self._read()

    def ask_all(self, deployment: str, method: str) -> list[Any]:
        """The answers of all replicas that answer."""
        return list(self.ask(deployment, f"{method} all"))

    def states(self) -> dict[str, dict[str, int]]:
        """Of each deployment, how many replicas are in each of Serve's states."""
        states: dict[str, dict[str, int]] = self.ask("states", "outrider")
        return states

    def redeploy(self, *flags: str) -> None:
        """Replace all replicas, a few at a time, by ones with other settings."""
        assert self.ask("redeploy", json.dumps(flags))

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == _TOO_SLOW:
                return line
            if line[:1] in '"{[0123456789t':
                return json.loads(line)
        said = "" if self.process.stderr is None else self.process.stderr.read()
        raise AssertionError(f"the service ended: {said[-2000:]}")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=240)
