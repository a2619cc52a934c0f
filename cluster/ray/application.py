"""The components as one application of Ray Serve: how many of each, with which resources, and how they end."""

from __future__ import annotations

from typing import Any, cast

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.models.target import ResolvedModel
from cluster.ray import scaling, sticky_router
from cluster.ray.deployments import DrafterDeployment, RetrievalDeployment, RouterDeployment, VerifierDeployment
from cluster.ray.resources import components, custom_share
from cluster.settings.config import Settings
from cluster.settings.placement import Placed

# Serve asks replicas for their health so often, and notices by it that one has died. Its own default of 10 s was most of the
# time for which a service with one router was away.
_HEALTH_PERIOD_S = 1.0
# One that has not answered so long, three times in a row, hangs and is replaced. With Serve's own 30 s, its streams stood
# still for a minute and a half.
_HEALTH_TIMEOUT_S = 10.0
# More than the callers of the components that stop need to notice.
_OTHERS_STOP_S = 5.0


def application(settings: Settings, model: ResolvedModel) -> serve.Application:
    """The application: router, verifier, drafter (unless these run elsewhere) and, if there is an index, retrieval."""
    drain_s = settings.server.drain_delay_s + settings.server.drain_grace_s
    router = _placed(RouterDeployment, settings, drain_s + _OTHERS_STOP_S)
    if settings.router.verifiers:
        return router.bind(settings, model, None, None)
    drafter = None
    if settings.drafter.address is None:
        retrieval = None
        if settings.retrieval.enabled:
            retrieval = _placed(RetrievalDeployment, settings, _OTHERS_STOP_S).bind(settings, model)
        drafter = _placed(DrafterDeployment, settings, _OTHERS_STOP_S).bind(settings, model, retrieval)
    verifier = _placed(
        VerifierDeployment, settings, settings.verifier.drain_s, request_router_config=_sticky(settings.verifier)
    ).bind(settings, model, drafter)
    return router.bind(settings, model, verifier, drafter)


def _sticky(verifier: Placed) -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=f"{sticky_router.__name__}.{sticky_router.StickyRouter.__name__}",
        # Any verifier may answer any request.
        request_router_kwargs={"num_fallback_replicas": verifier.most},
    )


def _placed(deployment: Any, settings: Settings, stop_s: float, **more: Any) -> serve.Deployment:
    """``deployment`` with its number, its resources and its health checks.

    Args:
        stop_s: seconds after which Serve kills a replica that stops.
    """
    component = components(settings)[deployment.name]
    custom = custom_share(settings, deployment.name)
    # A replica that cannot start has wrong settings or a wrong model, so a second attempt would fail as well.
    options: dict[str, Any] = more | {
        "ray_actor_options": {"num_cpus": component.num_cpus, "num_gpus": component.num_gpus, "resources": custom},
        "max_constructor_retry_count": 1,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": stop_s,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
    if component.autoscaling is None:
        options["num_replicas"] = component.replicas
    else:
        policy = AutoscalingPolicy(policy_function=f"{scaling.__name__}:{scaling.policy.__name__}")
        options["autoscaling_config"] = AutoscalingConfig(
            **component.autoscaling.model_dump(), aggregation_function="mean", policy=policy
        )
    if component.max_replicas_per_node is not None:
        options["max_replicas_per_node"] = component.max_replicas_per_node
    if component.processes > 1:
        # A bundle lies on one node, as the ranks of a stage must: it has room for all of them.
        ranks = component.processes_together
        bundle = {"CPU": component.num_cpus, "GPU": component.num_gpus} | custom
        # Ray rejects empty bundles.
        bundle = {name: ranks * amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}
        bundles = [bundle] * (component.processes // ranks)
        options |= {"placement_group_bundles": bundles, "placement_group_strategy": settings.cluster.placement.stages}
    return cast(serve.Deployment, deployment.options(**options))
