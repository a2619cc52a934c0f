"""Routers, and drafters without a model, start without torch, which takes longer to import than all of theirs. Others than routers
start without the API's servers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# What their replicas on Ray do before they serve, without Ray.
_STARTS = """
import asyncio, sys
from pathlib import Path

import cluster.app, cluster.ray.deployments
from cluster.settings import component_configs
from cluster.models.target import ResolvedModel
from cluster.settings.config import load
from services.drafter.service import DrafterService
from services.metrics.registry import DROPPED
from services.router.service import RouterService

async def start():
    settings, model = load(flags=["server.port=0"], environ={}), ResolvedModel(name="tiny", path=Path(sys.argv[1]))
    drafter = DrafterService(component_configs.drafter_config(settings, model))
    await drafter.start()
    RouterService(component_configs.router_config(settings, model), None, DROPPED)

asyncio.run(start())
print(sorted({"torch", "transformers", "scipy", "cluster.entry.public", "services.api.http.server"} & sys.modules.keys()))
"""


def test_each_component_does_without_what_only_others_need(tiny_model: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OUTRIDER_"))}
    done = subprocess.run(
        [sys.executable, "-c", _STARTS, str(tiny_model)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
