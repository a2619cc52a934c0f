"""Runs the application on Ray: a local one started here, or an existing one."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from cluster.config import Placed, Settings
from cluster.models import ResolvedModel
from cluster.preflight import preflight
from cluster.ray_address import foreign_ray, ray_is_here
from cluster.signals import stop_on_signals
from cluster.starting import wait_until_running
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# Set before the first import of Ray, which reads them then; every process that it starts inherits them.
_ENVIRONMENT = {
    # Serve's replicas listen on every interface and unpickle what they receive; only token authentication protects them.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_enable_open_telemetry": "0",
}


@contextmanager
def running_on_ray(settings: Settings, model: ResolvedModel, *, verbose: bool = False) -> Iterator[str]:
    """Serve on Ray during the block; yields the public "host:port". A Ray that was started here is stopped at the end.

    Set ``RAY_ADDRESS`` to use a running cluster.

    Raises:
        ConfigurationError: the service cannot start; says why.
    """
    # Report wrong settings before Ray starts, not in the log of a replica that fails.
    preflight(settings, model, here=ray_is_here())
    if settings.internal_token is None:
        settings = settings.model_copy(update={"internal_token": secrets.token_hex(32)})
    with _connected(verbose=verbose):
        from ray import serve

        from cluster.deployments import application

        # Importing Serve sets another level.
        logging.getLogger("ray.serve").setLevel(_level(verbose))
        name = settings.cluster.name
        _check_name(name)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "INFO" if verbose else "ERROR"})
        _check_resources(settings)
        target = serve.RunTarget(target=application(settings, model), name=name, route_prefix=None)
        try:
            handle = serve.run_many([target], wait_for_applications_running=False)[0]
            wait_until_running(name)
            yield handle.address.remote().result(timeout_s=60)
            handle.close.remote().result(timeout_s=60)
        finally:
            if foreign_ray() is not None:
                serve.delete(name)


@contextmanager
def _connected(*, verbose: bool) -> Iterator[None]:
    """Connect to the Ray that the environment names, or start a local one."""
    address = foreign_ray()
    if address is None:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    level = _level(verbose)
    try:
        if address is None:
            # Without an address, Ray would join any instance that it believes to run on this machine.
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=verbose,
                logging_level=level,
                configure_logging=verbose,
                _node_ip_address="127.0.0.1",
            )
        else:
            ray.init(address=address, log_to_driver=verbose, logging_level=level)
    except (RuntimeError, ConnectionError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        where = "cannot start a local Ray" if address is None else f"RAY_ADDRESS is {address}: cannot join that Ray"
        raise ConfigurationError(f"{where} ({_first_line(error)})") from error
    # Ray has installed signal handlers that do not interrupt waiting calls.
    stop_on_signals()
    try:
        yield
    finally:
        ray.shutdown()


def _level(verbose: bool) -> int:
    return logging.INFO if verbose else logging.ERROR


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _check_name(name: str) -> None:
    """Serve would replace an application of the same name, and this service would delete it at the end.

    Raises:
        ConfigurationError: an application of this name exists.
    """
    import ray
    from ray import serve

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return
    if name in serve.status().applications:
        raise ConfigurationError(
            f"cluster.name is {name}: an application of this name runs on this Ray already; "
            "stop it, or choose another name (--name) and another server.port"
        )


def _check_resources(settings: Settings) -> None:
    """Serve would wait forever for resources that the cluster lacks.

    Raises:
        ConfigurationError: the cluster has too few CPUs or GPUs.
    """
    import ray

    foreign = foreign_ray() is not None
    # On a shared Ray, only free resources count.
    available: Mapping[str, float] = ray.available_resources() if foreign else ray.cluster_resources()
    components: list[Placed] = [settings.router, settings.drafter, settings.verifier]
    if settings.retrieval.enabled:
        components.append(settings.retrieval)
    for name, wanted in (
        ("CPU", sum(component.num_cpus * component.processes * component.replicas for component in components)),
        ("GPU", sum(component.num_gpus * component.processes * component.replicas for component in components)),
    ):
        if wanted > available.get(name, 0):
            raise ConfigurationError(
                f"the components ask for {wanted:g} {name}s, but Ray has {available.get(name, 0):g}"
                f"{' to spare' if foreign else ''}; "
                f"lower num_{name.lower()}s, replicas or stages of router, drafter or verifier"
            )
