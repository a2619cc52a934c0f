"""The service on a local Ray, in a process of its own, so that the tests themselves stay outside of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Runs the service and answers questions about it on stdin.
_HOST = """
import json, sys
from pathlib import Path
from cluster.config import load
from cluster.models import ResolvedModel
from cluster.on_ray import running_on_ray

settings = load(flags=json.loads(sys.argv[2]), environ={})
with running_on_ray(settings, ResolvedModel(name="tiny", path=Path(sys.argv[1]))) as address:
    from ray import serve
    print(json.dumps(address), flush=True)
    for line in sys.stdin:
        deployment, method = line.split()
        handle = serve.get_deployment_handle(deployment, "outrider")
        print(json.dumps(getattr(handle, method).remote().result(timeout_s=60)), flush=True)
"""


class Service:
    """A service in a process of its own."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOST, str(folder), json.dumps(flags)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.address: str = self._read()

    def ask(self, deployment: str, method: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{deployment} {method}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line[:1] in '"{[0123456789':
                return json.loads(line)
        raise AssertionError("the service ended")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
