"""Custom resources of nodes: what is asked of Ray, and what is said where no node has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.app import build as build_application
from cluster.models.target import ResolvedModel
from cluster.ray.application import application
from cluster.ray.resources import Nodes, custom_resources_of_one_node, no_node_for, too_few, wait_for_nodes
from cluster.settings import component_configs
from cluster.settings.config import Settings, load
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

PINNED = {
    "cluster": {
        "placement": {"router": "at_entry", "drafter": "at_drafting", "retrieval": "at_drafting", "verifier": "at_gpus"}
    }
}
ENTRY, DRAFTING = {"CPU": 2.0, "at_entry": 1000.0}, {"CPU": 2.0, "at_drafting": 1000.0, "node:10.0.0.3": 1.0}
GPUS = {"CPU": 16.0, "GPU": 4.0, "at_gpus": 1000.0}
HEAD = {"CPU": 0.0, "memory": 1e9, "node:__internal_head__": 1.0}


def settings(*flags: str) -> Settings:
    return load(flags=flags, environ={}, over=PINNED)


def options_of(given: Settings, model: Path) -> dict[str, Any]:
    """What Serve is asked for, by component."""
    app: Any = application(given, ResolvedModel(name="tiny", path=model))
    waiting, found = [app._bound_deployment], {}
    while waiting:
        deployment = waiting.pop()
        found[deployment.name] = deployment
        waiting += [part._bound_deployment for part in deployment.init_args if hasattr(part, "_bound_deployment")]
    return found


def test_each_component_asks_for_its_own_resource(tiny_model: Path, tmp_path: Path) -> None:
    found = options_of(settings(f"retrieval.index={tmp_path}"), tiny_model)
    asked = {name: each.ray_actor_options["resources"] for name, each in found.items()}
    assert asked == {
        "router": {"at_entry": 0.001}, "drafter": {"at_drafting": 0.001}, "retrieval": {"at_drafting": 0.001},
        "verifier": {"at_gpus": 0.001},
    }  # fmt: skip
    for each in options_of(load(environ={}), tiny_model).values():
        assert not each.ray_actor_options["resources"]


def test_every_stage_asks_for_it(tiny_model: Path) -> None:
    flags = ("verifier.stages=3", "verifier.num_gpus=1", "cluster.placement.stages=STRICT_PACK")
    verifier = options_of(settings(*flags), tiny_model)["verifier"]
    config = verifier._deployment_config
    assert config is not None
    replica = verifier._replica_config
    assert replica.placement_group_strategy == "STRICT_PACK"
    assert replica.placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0, "at_gpus": 0.001}] * 3


def test_the_ranks_of_a_stage_lie_on_one_node(tiny_model: Path) -> None:
    """One bundle has room for all of them: Ray never splits a bundle over nodes, whatever the strategy."""
    flags = ("verifier.stages=2", "verifier.tensor_parallel_size=2", "verifier.num_cpus=3")
    config = options_of(settings(*flags), tiny_model)["verifier"]._replica_config
    assert config.placement_group_strategy == "PACK"
    assert config.placement_group_bundles == [{"CPU": 6.0, "at_gpus": 0.002}] * 2
    assert no_node_for(settings(*flags), [ENTRY, DRAFTING, GPUS | {"CPU": 6.0}, GPUS | {"CPU": 6.0}]) is None
    said = no_node_for(settings(*flags), [ENTRY, DRAFTING, *[GPUS | {"CPU": 3.0}] * 4])
    assert said is not None and said.startswith("a stage of 2 ranks asks for 6 CPUs and 0 GPUs on one node")


def test_nodes_that_have_all_of_it_are_enough() -> None:
    nodes = [HEAD, ENTRY, DRAFTING, GPUS]
    for flags in ((), ("verifier.num_gpus=1", "verifier.stages=4"), ("verifier.num_gpus=1", "verifier.replicas=4")):
        assert no_node_for(settings(*flags), nodes) is None
        assert too_few(settings(*flags), nodes) is None
    # Without placement, any node may hold any component.
    assert no_node_for(load(environ={}), [{"CPU": 1.0}]) is None


@pytest.mark.parametrize(
    ("nodes", "flags", "refusal"),
    [
        (
            [HEAD, DRAFTING, GPUS],
            (),
            ("cluster.placement", None, "has that resource (they have at_drafting, at_gpus)"),
        ),
        ([HEAD], (), ("cluster.placement", None, "they have none of their own")),
        # Retrieval asks for nothing where there is no index.
        ([ENTRY, GPUS], (), ("cluster.placement", None, "cluster.placement.drafter is at_drafting")),
        ([ENTRY, GPUS, DRAFTING], ("verifier.num_gpus=8",), ("cluster.placement", None, "a verifier asks for 1 CPUs and 8 GPUs on one node")),
        (
            [ENTRY, GPUS, GPUS, DRAFTING],
            ("verifier.num_gpus=1", "verifier.stages=8", "cluster.placement.stages=STRICT_PACK"),
            ("cluster.placement", None, "STRICT_PACK"),
        ),
        # GPUs of nodes that may not hold a verifier are no help.
        ([ENTRY | {"GPU": 8.0}, DRAFTING, {"CPU": 4.0, "at_gpus": 9.0}], ("verifier.num_gpus=1",), ("cluster.placement", None, "0 GPUs")),
    ],
)  # fmt: skip
def test_a_component_without_a_node_is_named(nodes: Nodes, flags: tuple[str, ...], refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal):
        wait_for_nodes(settings("cluster.placement.patience_s=0", *flags), lambda: nodes)


def test_stages_may_lie_on_two_nodes_unless_they_must_not() -> None:
    flags = ("verifier.num_gpus=1", "verifier.stages=8")
    assert no_node_for(settings(*flags), [ENTRY, DRAFTING, GPUS, GPUS]) is None


def test_nodes_that_are_too_few_for_all_replicas_are_told_by_their_resource() -> None:
    said = too_few(settings("verifier.num_gpus=2", "verifier.replicas=3"), [ENTRY | {"GPU": 8.0}, DRAFTING, GPUS])
    assert said is not None
    assert said.startswith("verifier ask for 6 GPUs on nodes with at_gpus, which have 4;")


def test_nodes_may_join_later() -> None:
    joined: list[dict[str, float]] = [HEAD]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        joined.append([ENTRY, DRAFTING, GPUS][len(slept) - 1])

    wait_for_nodes(settings("cluster.placement.patience_s=60"), lambda: joined, sleep)
    assert len(slept) == 3


def test_patience_ends_or_never_does() -> None:
    slept: list[float] = []
    with refuses(ConfigurationError, field="cluster.placement"):
        wait_for_nodes(settings("cluster.placement.patience_s=7"), lambda: [HEAD], slept.append)
    assert sum(slept) == 7
    # Groups that begin with no node get one only when a replica waits for it.
    wait_for_nodes(settings("cluster.placement.patience_s=null"), lambda: [HEAD], slept.append)


def test_a_ray_of_ones_own_has_them_all() -> None:
    # The same file serves on one machine and on a cluster; there is no index, so retrieval's own does not count.
    assert custom_resources_of_one_node(settings()) == {"at_entry": 1000, "at_drafting": 1000, "at_gpus": 1000}
    assert custom_resources_of_one_node(load(environ={})) == {}


@pytest.mark.parametrize("name", ["CPU", "memory", "", "with space", "node:x"])
def test_names_that_ray_gives_itself_are_refused(name: str) -> None:
    with refuses(ConfigurationError, field="cluster.placement.router"):
        settings(f"cluster.placement.router={name}")


def test_without_ray_the_application_is_built_at_once(tiny_model: Path, tmp_path: Path) -> None:
    assert build_application({"model": str(tiny_model), "cache_dir": str(tmp_path), **PINNED})


def test_stages_find_each_other_at_the_nodes_own_address(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.ray import deployments

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    given = deployments.with_own_stage_host(settings("verifier.stages=2", "verifier.stage_host=0.0.0.0"))
    assert (
        component_configs.verifier_config(given, ResolvedModel(name="tiny", path=tiny_model)).target.stage_host == "10.1.2.3"
    )
    named = settings("verifier.stages=2", "verifier.stage_host=192.168.0.1")
    assert deployments.with_own_stage_host(named).verifier.stage_host == "192.168.0.1"
