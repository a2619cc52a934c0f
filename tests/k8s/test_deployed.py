"""What the chart's RayService would submit, run: each profile on one Ray of several nodes, asked, changed under load and drained.

The operator, the kubelet and the pods' network are imitated (ray_of_groups.py); Ray, its custom resources, Serve's interface and
all of Outrider are real. One Ray for all tests, since so many processes take a while to start.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider import Client, SpeculativeDecoding
from retrieval_index.embedded import embedded_redis
from retrieval_index.store import IndexStore
from services.api.messages import ClientRequest, RequestedSampling, TextChunk
from tests.drafters.indexes import build_of
from tests.k8s.chart import PROFILES, groups, needs_helm
from tests.k8s.profiles_here import Deployable, Mounts, deployable
from tests.k8s.ray_of_groups import Pod, RayOfGroups
from tests.servers.checked_load import OPTIONS, Load, prompt, wait_until
from tests.servers.service import pipeline

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600), needs_helm]

ROOT = Path(__file__).parents[2]
# Nodes over which each verifier's stages lie: one or two verifiers on one node, one verifier on two nodes.
SPREAD = {"eight-h100-tp8": [1], "eight-h100-two-tp4": [1, 1], "multi-node": [2]}
SMALLEST = "cpu-demo"
# The profile with a retrieval index.
INDEXED = "multi-node"
# The head alone gets it, as it alone gets the URL of an index: it must count, so the application must be built there.
OF_HEAD = {"OUTRIDER_ROUTER__STRATEGY": "suffix"}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[int, tuple[int, ...]]:
    """What plain decoding says in one process, to each prompt with its number as the seed."""

    async def plain() -> dict[int, tuple[int, ...]]:
        found = {}
        async with pipeline(tiny_model) as running:
            for number in range(4):
                sampling = RequestedSampling(max_tokens=OPTIONS["max_tokens"], ignore_eos=True, temperature=1.0, seed=number)
                request = ClientRequest(input=tuple(prompt(number)), sampling=sampling, strategy="autoregressive", tenant="")
                events = running.router.generate(request)
                found[number] = tuple(
                    [token async for event in events if isinstance(event, TextChunk) for token in event.token_ids]
                )
        return found  # fmt: skip

    return asyncio.run(plain())


@pytest.fixture(scope="module")
def index_url(
    tiny_model: Path, expected: dict[int, tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Redis with an index of all that is asked and answered here."""
    folder = tmp_path_factory.mktemp("index")
    corpus = [token for number, answer in expected.items() for token in (*prompt(number), *answer)]
    build_of(folder / "index", tiny_model, corpus)
    with embedded_redis() as url:
        with IndexStore(url, "default") as store:
            store.publish(folder / "index")
        yield url


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory, index_url: str) -> Mounts:
    return Mounts(tmp_path_factory.mktemp("etc"), index_url)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def ray(tiny_model: Path, volume: Path, mounts: Mounts) -> Iterator[RayOfGroups]:
    """The head and a pod of each group, as the largest profile has them: enough for the smallest one."""
    pods = groups(deployable("multi-node", tiny_model, volume, mounts).manifests)
    running = RayOfGroups(pods["head"], secrets.token_hex(32), **OF_HEAD)
    try:
        for group in ("router", "drafting", "verifier"):
            running.add(group, pods[group])
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def all_pods(ray: RayOfGroups, tiny_model: Path, volume: Path, mounts: Mounts) -> RayOfGroups:
    """The same Ray with all pods of the largest profile, two of routers and of verifiers."""
    pods = groups(deployable("multi-node", tiny_model, volume, mounts).manifests)
    for group in ("router", "verifier"):
        ray.add(group, pods[group])
    return ray


def over_http(service: Deployable, number: int) -> tuple[int, ...]:
    """The tokens of an answer through OpenAI's API."""
    body = {
        "prompt": prompt(number), "max_tokens": OPTIONS["max_tokens"], "temperature": 1.0, "seed": number, "ignore_eos": True,
        "return_token_ids": True, "speculation": {"strategy": "prompt_lookup"},
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "Host": service.host}
    if service.api_key is not None:
        headers["Authorization"] = f"Bearer {service.api_key}"
    context = ssl.create_default_context(cadata=service.ca.decode()) if service.ca is not None else None
    request = urllib.request.Request(f"{service.http}/v1/completions", data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        (choice,) = json.load(answer)["choices"]
    return tuple(choice["token_ids"])


def client_of(service: Deployable) -> Client:
    return Client(service.grpc, api_key=service.api_key, tls=service.ca is not None, root_certificates=service.ca)


def places(state: dict[str, Any]) -> dict[str, set[str]]:
    """On which nodes the replicas of each component are."""
    return {
        name: {replica["node_id"] for replica in part["replicas"] if replica["state"] == "RUNNING"}
        for name, part in state["deployments"].items()
    }


# One of them stands for all in `make test`, where it starts the pods that it needs.
@pytest.mark.parametrize(
    "profile", [name if name == SMALLEST else pytest.param(name, marks=pytest.mark.exhaustive) for name in PROFILES]
)
def test_each_profile_answers_as_plain_decoding_does(
    profile: str,
    request: pytest.FixtureRequest,
    tiny_model: Path,
    volume: Path,
    mounts: Mounts,
    expected: dict[int, tuple[int, ...]],
) -> None:
    ray: RayOfGroups = request.getfixturevalue("ray" if profile == SMALLEST else "all_pods")
    service = deployable(profile, tiny_model, volume, mounts)
    ray.deploy(service.config)
    state = ray.wait_until_running()
    with client_of(service) as client:
        (model,) = client.models()
        assert model.default_strategy == "suffix"
        # Drafts that come too late are none: how often it has to be said depends on the machine.
        wait_until(lambda: all(checked(client, expected, number).num_draft_tokens > 0 for number in (0, 1)))
        if profile == INDEXED:
            for strategy in ("rest", "spectra_retrieval"):
                # It has all been said before; the index may still be on its way.
                told = {"strategy": strategy}
                wait_until(lambda: checked(client, expected, 3, **told).num_accepted_draft_tokens > 40)  # noqa: B023
    assert over_http(service, 2) == expected[2]
    found = places(state)
    # Each group's pods hold their own component and nothing else; on how many of them the stages of each verifier are:
    assert [len(set(nodes)) for nodes in ray.bundles()] == SPREAD.get(profile, [])
    assert not found["router"] & found["verifier"] and not found["router"] & found["drafter"]
    assert not found["drafter"] & found["verifier"]
    assert found.get("retrieval", found["drafter"]) == found["drafter"]
    assert ("retrieval" in found) == (profile == INDEXED)


def checked(client: Client, expected: dict[int, tuple[int, ...]], number: int, **options: Any) -> SpeculativeDecoding:
    """What an answer, which is what plain decoding says, owes to drafts."""
    answer = client.generate(token_ids=prompt(number), seed=number, **OPTIONS | options)
    assert answer.token_ids == expected[number]
    return answer.speculative_decoding


@pytest.fixture(scope="module")
def loaded(all_pods: RayOfGroups, tiny_model: Path, volume: Path, mounts: Mounts) -> Deployable:
    """Two of each where there are two pods: what the tests under load begin with."""
    values = {"settings": {"router": {"replicas": 2}, "verifier": {"replicas": 2}}}
    service = deployable(SMALLEST, tiny_model, volume, mounts, values)
    all_pods.deploy(service.config)
    all_pods.wait_until_running()
    return service


def changed(service: Deployable, **sections: dict[str, Any]) -> dict[str, Any]:
    """The same RayService with other settings."""
    (application,) = service.config["applications"]
    args = dict(application["args"])
    for name, section in sections.items():
        args[name] = args[name] | section
    return service.config | {"applications": [application | {"args": args}]}


def replicas(ray: RayOfGroups) -> dict[str, set[str]]:
    """Those of each component that run; Serve names none while it builds the application."""
    found = ray.application()["deployments"]
    return {
        part: {each["replica_id"] for each in found.get(part, {"replicas": []})["replicas"] if each["state"] == "RUNNING"}
        for part in ("router", "drafter", "verifier")
    }


def replaced(ray: RayOfGroups, before: dict[str, set[str]]) -> bool:
    """Whether other replicas run in the place of all of these."""
    now = replicas(ray)
    return all(len(now[part]) == len(old) and not old & now[part] for part, old in before.items())


@pytest.mark.exhaustive
def test_changed_settings_are_applied_in_place_and_cost_no_stream(
    ray: RayOfGroups, loaded: Deployable, expected: dict[int, tuple[int, ...]]
) -> None:
    before = replicas(ray)
    load = Load(loaded.grpc, expected)
    try:
        wait_until(lambda: load.answers > 4)
        ray.deploy(changed(loaded, router={"num_speculative_tokens": 3}))
        wait_until(lambda: replaced(ray, before), every_s=1)
        ray.wait_until_running()
        seen = load.answers
        wait_until(lambda: load.answers > seen + 4)
    finally:
        load.stop()
    assert not load.failures


@pytest.mark.exhaustive
def test_settings_that_cannot_be_are_refused_and_the_service_goes_on(
    ray: RayOfGroups, loaded: Deployable, expected: dict[int, tuple[int, ...]]
) -> None:
    before = replicas(ray)
    ray.deploy(changed(loaded, cluster={"placement": {"verifier": "outrider_h100", "patience_s": 1}}))
    wait_until(lambda: ray.application()["status"] == "DEPLOY_FAILED")
    said = ray.application()["message"]
    assert "cluster.placement.verifier is outrider_h100: no node of this Ray has that resource" in said
    assert "(they have outrider_drafting, outrider_router, outrider_verifier)" in said
    with Client(loaded.grpc) as client:
        assert client.generate(token_ids=prompt(3), seed=3, **OPTIONS).token_ids == expected[3]
    ray.deploy(changed(loaded, router={"num_speculative_tokens": 3}))
    ray.wait_until_running()
    # What ran before runs still: a wrong change has cost nothing.
    assert replicas(ray) == before


@pytest.mark.exhaustive
def test_the_command_line_refuses_a_cluster_without_the_nodes(ray: RayOfGroups, tiny_model: Path) -> None:
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    told = subprocess.run(
        [str(Path(sys.executable).parent / "outrider"), "serve", "--model", str(tiny_model), "--port", "0", "--name", "other",
         "--set", "cluster.placement.router=outrider_entry"],
        env=known | ray.environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert told.returncode == 2
    assert "cluster.placement.router is outrider_entry: no node of this Ray has that resource" in " ".join(
        told.stderr.split()
    )


def leave(ray: RayOfGroups, service: Deployable, pod: Pod) -> str:
    """What a router's pod runs before it stops, run in the pod; gives what it says."""
    (container,) = groups(service.manifests)["router"]["template"]["spec"]["containers"]
    assert "POD_IP" in {each["name"] for each in container["env"]}
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "outrider"
    known = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "cli", *command[1:]], env=known | ray.environment() | {"POD_IP": pod.address}, cwd=ROOT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.exhaustive
def test_pods_that_are_told_to_stop_end_their_streams_first(
    ray: RayOfGroups, loaded: Deployable, expected: dict[int, tuple[int, ...]]
) -> None:
    """A router's and a verifier's node at once, as when Kubernetes drains a machine."""
    last = dict(ray.pods)
    victims = [last["router"], last["verifier"]]
    load = Load(loaded.grpc, expected)
    try:
        wait_until(lambda: load.answers > 4)
        # Of a machine that is drained all pods are told at once. One without a router changes nothing.
        with ThreadPoolExecutor() as kubelet:
            told = list(kubelet.map(lambda group: leave(ray, loaded, last[group]), ("drafting", "router")))
        assert told == ["0 routers of this node have ended\n", "1 router of this node has ended\n"]
        # At once, as the kubelet does: until then Serve may start another router there.
        for pod in victims:
            pod.terminate()
        wait_until(lambda: all(pod.process.poll() is not None for pod in victims), 240)
        seen = load.answers
        wait_until(lambda: load.answers > seen + 4)
    finally:
        load.stop()
    assert not load.failures
    # Those that are left hold what there is room for: one router a pod, and both verifiers.
    wait_until(lambda: [len(replicas(ray)[part]) for part in ("router", "verifier")] == [1, 2], every_s=1)
