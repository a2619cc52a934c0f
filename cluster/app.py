"""The service for `serve deploy` and KubeRay's RayService, which start it from an import path and a mapping of settings.

proxy_location: Disabled
applications:
  - name: outrider
    import_path: cluster.app:build
    route_prefix: null
    args: {model: smollm2-135m-instruct, verifier: {replicas: 2}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.checks.preflight import preflight
from cluster.models.target import resolve
from cluster.ray.application import application
from cluster.ray.resources import wait_for_nodes
from cluster.settings.config import load
from cluster.settings.recognition import with_token
from speculation.errors import ConfigurationError


def build(args: dict[str, Any]) -> serve.Application:
    """The application for these settings.

    ``args`` is what a configuration file holds, and goes before the environment; its key ``config`` may name a file, which
    comes after both. The model is fetched here, on the node that builds, so ``cache_dir`` must be one folder for all nodes.
    ``cluster.name`` is the name under which Serve knows the application: keep the two equal.

    Raises:
        ConfigurationError: the settings or the model cannot be used; says why.
    """
    given = dict(args)
    file = given.pop("config", None)
    if file is not None and not isinstance(file, str):
        raise ConfigurationError(field="config", value=f"{file!r}", allowed="the path of a YAML file")
    settings = load(Path(file) if file is not None else None, over=given)
    # Ports are looked at by the routers: those of an earlier version of this application hold them now.
    preflight(settings, here=False)
    if ray.is_initialized():
        # KubeRay asks for the service as soon as the head answers. What waits for a node that never comes says nothing.
        wait_for_nodes(settings)
    model = resolve(settings.model, settings.cache_dir)
    return application(with_token(settings), model)
