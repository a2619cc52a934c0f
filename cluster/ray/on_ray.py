"""Runs the application on Ray: a local one started here, or an existing one."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from cluster.checks.preflight import preflight
from cluster.entry.public import Addresses
from cluster.models.target import ResolvedModel
from cluster.process.logs import take_over
from cluster.process.observing import export_of
from cluster.process.signals import STOPPED_AT_ONCE, stop_on_signals
from cluster.ray.address import foreign_ray, ray_answers, ray_is_here
from cluster.ray.leaving import disconnect
from cluster.ray.resources import components, custom_resources_of_one_node, no_node_for, nodes_of_ray, too_few
from cluster.ray.session_folder import session_folder
from cluster.ray.starting import wait_until_running
from cluster.ray.watch import watching_ray
from cluster.settings.config import Settings
from cluster.settings.recognition import with_token
from speculation.errors import ConfigurationError

log = logging.getLogger(__name__)

# More than components need to close, besides the time in which routers drain.
_CLOSE_S = 10.0
# Set before the first import of Ray, which reads them then; every process that it starts inherits them.
ENVIRONMENT = {
    # Serve's replicas listen on every interface and unpickle what they receive; only token authentication protects them.
    "RAY_AUTH_MODE": "token",
    # Keeps the rest of a Ray of one machine on loopback, its metrics ports included, which ask for no token. On Linux Ray
    # otherwise puts the machine's address in the place of 127.0.0.1, and listens on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers otherwise give way to every other process of the machine. Ours answer users.
    "RAY_worker_niceness": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}


@contextmanager
def running_on_ray(settings: Settings, model: ResolvedModel, *, verbose: bool = False) -> Iterator[Addresses]:
    """Serve on Ray during the block; yields where it answers. A Ray that was started here is stopped at the end.

    Set ``RAY_ADDRESS`` to use a running cluster.

    Raises:
        ConfigurationError: the service cannot start; says why.
    """
    # Report wrong settings before Ray starts, not in the log of a replica that fails.
    preflight(settings, model, here=ray_is_here())
    export_of(settings, on_ray=True)
    # Replicas log on their own: to Ray's files, and where their lines are shown here also to this process.
    shown = verbose or settings.logging.format == "json"
    logging_ = settings.logging
    if logging_.level is None:
        settings = settings.model_copy(
            update={"logging": logging_.model_copy(update={"level": "info" if verbose else "warning"})}
        )
    own = custom_resources_of_one_node(settings)
    with _connected(own, verbose=verbose, shown=shown, bare=settings.logging.format == "json"):
        from ray import serve

        from cluster.ray.application import application

        settings = with_token(settings)

        # Importing Serve sets another level, and handlers.
        logging.getLogger("ray.serve").setLevel(_level(verbose))
        if settings.logging.format == "json":
            take_over("ray.serve")
        name = settings.cluster.name
        _check_name(name)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "INFO" if verbose else "ERROR"})
        _check_resources(settings)
        target = serve.RunTarget(target=application(settings, model), name=name, route_prefix=None)
        try:
            handle = serve.run_many([target], wait_for_applications_running=False)[0]
            wait_until_running(name)
            yield handle.addresses.remote().result(timeout_s=60)
            _close(settings)
        finally:
            if foreign_ray() is not None:
                serve.delete(name)


def _close(settings: Settings) -> None:
    """Let the routers end their answers before the components behind them go, and those keep what they have learnt."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    drain_s = settings.server.drain_delay_s + settings.server.drain_grace_s
    placed = components(settings)
    for component in (name for name in ("router", "verifier", "drafter") if name in placed):
        timeout_s = _CLOSE_S + (drain_s if component == "router" else 0.0)
        try:
            closing = serve.get_deployment_handle(component, settings.cluster.name).broadcast("close")
            closing.results(timeout_s=timeout_s, return_exceptions=True)
        except (TimeoutError, RayServeException, RayError) as error:
            log.warning("not every %s has closed: %s", component, error)


@contextmanager
def _connected(own: dict[str, float], *, verbose: bool, shown: bool, bare: bool) -> Iterator[None]:
    """Connect to the Ray that the environment names, or start a local one.

    Args:
        own: custom resources that a local one gets.
        shown: whether this process shows what replicas write.
        bare: without Ray's prefix, which would make of an object a line that cannot be read.
    """
    address = foreign_ray()
    if bare:
        os.environ["RAY_DISABLE_WORKER_LOG_PREFIX"] = "1"
    if address is None:
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    level = _level(verbose)
    if bare:
        take_over("ray")
    with session_folder() if address is None else nullcontext() as folder:
        try:
            if address is None:
                # Without an address, Ray would join any instance that it believes to run on this machine.
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=shown,
                    logging_level=level,
                    configure_logging=verbose and not bare,
                    resources=own,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder),
                )
            else:
                ray.init(address=address, log_to_driver=shown, logging_level=level, configure_logging=not bare)
        # Ray raises bare exceptions too, such as where a node takes too long to start.
        except Exception as error:
            where = "cannot start a local Ray" if address is None else f"RAY_ADDRESS is {address}: cannot join that Ray"
            raise ConfigurationError(f"{where} ({_first_line(error)})") from error
        # Ray has installed signal handlers that do not interrupt waiting calls.
        stop_on_signals(STOPPED_AT_ONCE)
        gcs = ray.get_runtime_context().gcs_address
        try:
            with watching_ray(lambda: ray_answers(gcs), local=address is None):
                yield
        finally:
            disconnect()


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
            (
                "an application of this name runs on this Ray already; stop it, or choose another name (--name) "
                "and another server.port"
            ),
            field="cluster.name",
            value=name,
        )


def _check_resources(settings: Settings) -> None:
    """Serve would wait forever for resources that the cluster lacks.

    Raises:
        ConfigurationError: the cluster has too few CPUs or GPUs, or lacks nodes that ``cluster.placement`` asks for.
    """
    import ray

    foreign = foreign_ray() is not None
    # On a shared Ray, only free resources count.
    available: Mapping[str, float] = ray.available_resources() if foreign else ray.cluster_resources()
    running = components(settings).values()
    for name, wanted in (
        ("CPU", sum(component.num_cpus * component.processes * component.fewest for component in running)),
        ("GPU", sum(component.num_gpus * component.processes * component.fewest for component in running)),
    ):
        if wanted > available.get(name, 0):
            raise ConfigurationError(
                f"the components ask for {wanted:g} {name}s, but Ray has {available.get(name, 0):g}"
                f"{' to spare' if foreign else ''}; "
                f"lower num_{name.lower()}s, replicas or stages of router, drafter or verifier"
            )
    nodes = nodes_of_ray()
    if why := no_node_for(settings, nodes) or too_few(settings, nodes):
        raise ConfigurationError(why, about="cluster.placement")
