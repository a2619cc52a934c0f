"""What the components ask of Ray's nodes, and whether there are such nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cluster.settings.config import Settings
from cluster.settings.placement import Placed
from speculation.errors import ConfigurationError

# Of a custom resource, for each process: so little that cores and GPUs decide how many a node holds.
_SHARE = 0.001
# What a node that this service starts has of each: more than all processes together ask for.
_WHOLE = 1000.0
_LOOK_AGAIN_S = 0.5

# What each node has, by Ray's names: CPU, GPU and custom ones.
Nodes = Sequence[Mapping[str, float]]


def components(settings: Settings) -> dict[str, Placed]:
    """The components that run, by their names."""
    if settings.router.verifiers:
        # Those are elsewhere, and bring their own drafters.
        return {"router": settings.router}
    found: dict[str, Placed] = {"router": settings.router, "drafter": settings.drafter, "verifier": settings.verifier}
    if settings.drafter.address is not None:
        # It runs elsewhere, and looks up in an index of its own.
        del found["drafter"]
    elif settings.retrieval.enabled:
        found["retrieval"] = settings.retrieval
    return found


def custom_resource(settings: Settings, component: str) -> str | None:
    """The resource that nodes must have to hold ``component``; None: any node may."""
    name: str | None = getattr(settings.cluster.placement, component)
    return name


def custom_share(settings: Settings, component: str) -> dict[str, float]:
    """What each process of ``component`` asks for of its custom resource."""
    name = custom_resource(settings, component)
    return {} if name is None else {name: _SHARE}


def custom_resources_of_one_node(settings: Settings) -> dict[str, float]:
    """The custom resources of a node that may hold every component."""
    names = (custom_resource(settings, component) for component in components(settings))
    return {name: _WHOLE for name in names if name is not None}


def no_node_for(settings: Settings, nodes: Nodes) -> str | None:
    """Why some component would never find a node, in a sentence; None if each would, if it were alone there."""
    for name, component in components(settings).items():
        wanted = custom_resource(settings, name)
        fitting = [node for node in nodes if wanted is None or node.get(wanted, 0) >= _SHARE]
        if not fitting:
            return (
                f"cluster.placement.{name} is {wanted}: no node of this Ray has that resource ({_custom(nodes)}); "
                "start nodes with it (ray start --resources, or a worker group's resources), or name another one"
            )
        strict = settings.cluster.placement.stages == "STRICT_PACK"
        on_one = component.processes if strict else component.processes_together
        asked = {"CPU": component.num_cpus * on_one, "GPU": component.num_gpus * on_one}
        if not any(all(node.get(kind, 0) >= amount for kind, amount in asked.items()) for node in fitting):
            packed = (
                f"verifier of {on_one} processes (cluster.placement.stages: STRICT_PACK)"
                if strict
                else f"stage of {on_one} ranks"
            )
            what = f"a {packed if on_one > 1 else name}"
            where = "no node of this Ray" if wanted is None else f"no node with {wanted}"
            most = " and ".join(f"{max(node.get(kind, 0) for node in fitting):g} {kind}s" for kind in asked)
            return (
                f"{what} asks for {asked['CPU']:g} CPUs and {asked['GPU']:g} GPUs on one node, which {where} has "
                f"(at most {most}); lower {name}.num_cpus or num_gpus"
            )
    return None


def too_few(settings: Settings, nodes: Nodes) -> str | None:
    """Which custom resource's nodes together hold fewer replicas than are started, in a sentence; None: there is room."""
    running = components(settings)
    for resource in dict.fromkeys(custom_resource(settings, name) for name in running):
        if resource is None:
            continue
        there = [node for node in nodes if resource in node]
        placed = {name: part for name, part in running.items() if custom_resource(settings, name) == resource}
        for kind, field in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            wanted = sum(getattr(part, field) * part.processes * part.fewest for part in placed.values())
            if wanted > (has := sum(node.get(kind, 0) for node in there)):
                return (
                    f"{' and '.join(placed)} ask for {wanted:g} {kind}s on nodes with {resource}, which have {has:g}; "
                    f"lower {field} or replicas there, or add such nodes"
                )
    return None


def nodes_of_ray() -> Nodes:
    """What each node has that lives; this process must be connected to Ray."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def wait_for_nodes(
    settings: Settings, look: Callable[[], Nodes] = nodes_of_ray, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the nodes that ``cluster.placement`` asks for have joined, at most ``cluster.placement.patience_s``.

    Raises:
        ConfigurationError: one is still missing; says which.
    """
    placement = settings.cluster.placement
    if not custom_resources_of_one_node(settings) or placement.patience_s is None:
        return
    waited = 0.0
    while (why := no_node_for(settings, look())) is not None:
        if waited >= placement.patience_s:
            raise ConfigurationError(
                f"{why}; waited {placement.patience_s:g} s (cluster.placement.patience_s)", about="cluster.placement"
            )
        sleep(_LOOK_AGAIN_S)
        waited += _LOOK_AGAIN_S


def _custom(nodes: Nodes) -> str:
    known = {"CPU", "GPU", "memory", "object_store_memory"}
    # Ray marks nodes, accelerators and implicit resources with names of its own, which have a colon or underscores in front.
    found = {name for node in nodes for name in node if name not in known and ":" not in name and not name.startswith("_")}
    return f"they have {', '.join(sorted(found))}" if found else "they have none of their own"
