"""`outrider plan` for other programs, and for pods instead of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from cluster.checks.listeners import Listener, listeners
from cluster.checks.offered import Offer, in_manifests, read_offer
from cluster.checks.pods import _gpus, preflight_in_pods
from cluster.settings.config import load
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

POD = {"pods": [1, 1], "cpu": "4", "memory": "4Gi", "shared_memory": "64Mi"}


def offer(path: Path | str = "/nowhere", **groups: Any) -> Offer:
    named = {name: POD | groups.get(name, {}) for name in ("router", "drafting", "verifier")}
    return read_offer({"storage": {"path": str(path), "size": "1Gi"}, "groups": named}, "pods.yaml")


def test_listeners_are_told_with_their_callers() -> None:
    flags = ["verifier.stages=2", "retrieval.index=/x", "server.http_port=0", "server.host=0.0.0.0"]
    found = {each.name: each for each in listeners(load(flags=flags, environ={}))}
    assert list(found) == ["grpc", "http", "ops", "drafts", "lookups", "stages"]
    assert found["grpc"] == Listener(component="router", name="grpc", host="0.0.0.0", port=50051, callers="clients")
    assert (found["http"].port, found["ops"].callers, found["stages"].callers) == (None, "operators", "components")
    none = listeners(load(flags=["server.http_port=null", "server.ops_port=null"], environ={}))
    assert [each.name for each in none] == ["grpc", "drafts"]
    free = listeners(load(flags=["server.port=0"], environ={}))
    assert all(each.port is None for each in free)


def test_a_plan_for_programs(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "outrider.yaml"
    file.write_text(
        f"{{cache_dir: {tmp_path}, model: {tiny_model}, server: {{port: 0}}, verifier: {{kv_cache_tokens: 1024, "
        "autoscaling: {max_replicas: 3}}}"
    )
    said = CliRunner().invoke(app, ["plan", "--config", str(file), "--json"])
    assert said.exit_code == 0, said.output
    plan = json.loads(said.stdout)
    parts = {each["name"]: each for each in plan["components"]}
    assert parts["verifier"] == {"name": "verifier", "replicas": [1, 3], "processes": 1, "num_cpus": 1.0, "num_gpus": 0.0}
    # Two layers, keys and values, two heads of 16 numbers, 4 bytes each.
    assert plan["kv_cache_bytes"] == 2 * 2 * 2 * 16 * 4 * 1024
    assert plan["unchecked"] == []


def test_a_volume_that_is_here_is_looked_at(tiny_model: Path, tmp_path: Path) -> None:
    """As in the first container of the head."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    settings = load(flags=[f"model={model}", f"cache_dir={tmp_path}"], environ={})
    examined = preflight_in_pods(settings, offer(tmp_path))
    assert (examined.folder, examined.unchecked) == (model, ())
    (model / "config.json").write_text("{")
    with refuses(ConfigurationError, field="model/config.json"):
        preflight_in_pods(settings, offer(tmp_path))
    missing = load(
        flags=[f"retrieval.index={tmp_path / 'index'}", f"cache_dir={tmp_path}", f"model={tiny_model}"], environ={}
    )
    with refuses(ConfigurationError, field="settings.model"):
        preflight_in_pods(missing, offer(tmp_path))


def test_a_volume_that_is_elsewhere_is_left_unchecked(tiny_model: Path) -> None:
    flags = ["model=/nowhere/m", "cache_dir=/nowhere", "drafter.models=[/nowhere/d]", "retrieval.index=/nowhere/i"]
    settings = load(flags=[*flags, "router.strategy=eagle"], environ={})
    examined = preflight_in_pods(settings, offer())
    assert [what.partition(":")[0] for what in examined.unchecked] == [
        "drafter.models", "retrieval.index", "the model's files and memory",
    ]  # fmt: skip
    # With a copy of the model there is one thing less.
    assert len(preflight_in_pods(settings, offer(), tiny_model).unchecked) == 2
    with refuses(ConfigurationError, field="router.strategy", value="magic", allowed="one of"):
        preflight_in_pods(load(flags=[*flags, "router.strategy=magic"], environ={}), offer())


def test_verifiers_that_share_a_pod_share_its_cores() -> None:
    flags = ["cache_dir=/nowhere", "model=/nowhere/m", "verifier.device=cuda", "verifier.num_gpus=1", "verifier.stages=2"]
    settings = load(flags=[*flags, "verifier.num_cpus=1"], environ={})
    preflight_in_pods(settings, offer(verifier={"gpus": 4}))
    with refuses(ConfigurationError, field="groups.verifier.cpu", value=4):
        preflight_in_pods(settings, offer(verifier={"gpus": 8}))
    # Half of a GPU each.
    halves = load(flags=[*flags, "verifier.stages=1", "verifier.num_gpus=0.5"], environ={})
    preflight_in_pods(halves, offer(verifier={"gpus": 2}))


def test_a_driver_that_does_not_run_the_images_cuda_is_refused() -> None:
    flags = ["cache_dir=/nowhere", "model=/nowhere/m", "verifier.device=cuda", "verifier.num_gpus=1"]
    settings = load(flags=flags, environ={})
    with refuses(ConfigurationError, "groups.verifier.gpuDriver", "570.86.15", "the image's CUDA 13.0 needs 580 or later"):
        preflight_in_pods(settings, offer(verifier={"gpus": 1, "gpu_driver": "570.86.15"}))
    known = preflight_in_pods(settings, offer(verifier={"gpus": 1, "gpu_driver": "580.95.05"}))
    # Without a word on the nodes' driver, which is needed is said.
    unknown = preflight_in_pods(settings, offer(verifier={"gpus": 1}))
    (said,) = set(unknown.unchecked) - set(known.unchecked)
    assert "needs NVIDIA's 580 or later (groups.verifier.gpuDriver" in said


def test_the_ranks_of_a_stage_need_one_pod() -> None:
    flags = ["cache_dir=/nowhere", "model=/nowhere/m", "verifier.device=cuda", "verifier.num_gpus=1"]
    settings = load(
        flags=[*flags, "verifier.num_cpus=0.5", "verifier.stages=2", "verifier.tensor_parallel_size=2"], environ={}
    )
    assert not list(_gpus(settings, offer(verifier={"gpus": 2}).groups.verifier))
    (refused,) = _gpus(settings, offer(verifier={"gpus": 1}).groups.verifier)
    assert (refused.field, refused.value) == ("groups.verifier.gpus", "1")
    assert "stages 2 x tensor_parallel_size 2 x num_gpus 1" in str(refused) and "in whole stages" in str(refused)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("a: [", ("-", None, "not YAML")),
        (
            "data: {outrider.yaml: '', pods.yaml: ''}\n---\ndata: {outrider.yaml: '', pods.yaml: ''}",
            ("-", None, "holds 2 ConfigMaps"),
        ),
        ("data: {outrider.yaml: '', pods.yaml: ''}", ("content", "null")),
        ("[]", ("-", None, "holds 0 ConfigMaps")),
    ],
)
def test_manifests_that_are_none(text: str, refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal):
        in_manifests(text, "-")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--manifests", "x", "--config", "y"], "--manifests holds settings and pods"),
        (["--manifests", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["--pods", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
    ],
)
def test_wrong_words(words: list[str], says: str) -> None:
    said = CliRunner().invoke(app, ["plan", *words])
    assert isinstance(said.exception, ConfigurationError)
    assert says in str(said.exception)
