"""A Ray of our own on this machine, or an existing one, with the application on it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cluster import build
from cluster.config import Placed, Settings
from cluster.models import ResolvedModel
from services.links.public_server import check_server
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Set before Ray is imported for the first time: it reads them then, and every process that it starts inherits them.
_ENVIRONMENT = {
    # Serve's replicas listen on every interface and unpickle what they are sent; only token authentication protects that.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_enable_open_telemetry": "0",
}


@contextmanager
def running(settings: Settings, model: ResolvedModel, *, verbose: bool = False) -> Iterator[str]:
    """Serve on Ray for the block; gives the public "host:port". Stops a Ray that it has started itself.

    Set ``RAY_ADDRESS`` to use a cluster that runs already.
    """
    own = "RAY_ADDRESS" not in os.environ
    if own:
        # What is wrong with the settings shall be said before Ray starts, not in the log of a replica that dies of it.
        check_server(build.server_config(settings))
        build.router_config(settings, model)
        build.drafter_config(settings)
        if settings.retrieval.enabled:
            build.retrieval_config(settings, model)
        build.verifier_config(settings, model)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if settings.internal_token is None:
        settings = settings.model_copy(update={"internal_token": secrets.token_hex(32)})
    import ray
    from ray import serve

    from cluster.deployments import APPLICATION, application

    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray.serve").setLevel(level)
    if own:
        ray.init(
            include_dashboard=False,
            log_to_driver=verbose,
            logging_level=level,
            configure_logging=verbose,
            _node_ip_address="127.0.0.1",
        )
    else:
        ray.init(log_to_driver=verbose, logging_level=level)
    try:
        serve.start(proxy_location="Disabled", logging_config={"log_level": "INFO" if verbose else "ERROR"})
        _check_resources(settings, ray.cluster_resources())
        handle = serve.run(application(settings, model), name=APPLICATION, route_prefix=None)
        try:
            yield handle.address.remote().result(timeout_s=60)
            handle.close.remote().result(timeout_s=60)
        finally:
            if not own:
                serve.delete(APPLICATION)
    finally:
        ray.shutdown()


def _check_resources(settings: Settings, available: Mapping[str, float]) -> None:
    """Serve would wait for ever for resources that the cluster lacks.

    Raises:
        ConfigurationError: the cluster has too few CPUs or GPUs.
    """
    components: list[Placed] = [settings.router, settings.drafter, settings.verifier]
    if settings.retrieval.enabled:
        components.append(settings.retrieval)
    for name, wanted in (
        ("CPU", sum(component.num_cpus * component.processes * component.replicas for component in components)),
        ("GPU", sum(component.num_gpus * component.processes * component.replicas for component in components)),
    ):
        if wanted > available.get(name, 0):
            raise ConfigurationError(
                f"the components ask for {wanted:g} {name}s, but Ray has {available.get(name, 0):g}; "
                f"lower num_{name.lower()}s, replicas or stages of router, drafter or verifier"
            )
