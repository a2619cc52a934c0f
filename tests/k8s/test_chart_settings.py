"""The chart's settings are those of the command line: rendered once, accepted there, complete in the schema, in fresh files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.plan_command import split
from cluster.checks.offered import amount, in_manifests, read_offer
from cluster.checks.pods import preflight_in_pods
from cluster.checks.preflight import preflight
from cluster.settings.config import Settings, load
from k8s.values_reference import BOUNDS, CHART, GROUPS, OWN, meanings, schema, schema_text, values, with_table
from speculation.errors import ConfigurationError
from tests.k8s.chart import PROFILES, groups, needs_helm, one, render, serve_config, settings, text
from tests.k8s.test_chart_valid import CASES
from tests.running.refusals import refuses


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_ray_and_the_plan_get_one_tree(case: Any) -> None:
    made = render(case)
    config = serve_config(made)
    (application,) = config["applications"]
    assert application["args"] == settings(made)
    assert (application["import_path"], application["route_prefix"]) == ("cluster.app:build", None)
    assert config["proxy_location"] == "Disabled"
    assert application["name"] == load(over=settings(made), environ={}).cluster.name


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_the_plan_accepts_every_profile(case: Any) -> None:
    over, offer = in_manifests(text(case), "-")
    examined = preflight_in_pods(load(over=over, environ={}), offer)
    assert all("not on this machine" in what for what in examined.unchecked)


@needs_helm
def test_a_drafter_elsewhere_has_no_pods_here() -> None:
    """Whoever runs it gets texts to draft for, and nothing of the cluster; both sides show certificates and one token."""
    values = {
        "settings": {"drafter": {"address": "drafts.example:50061", "trusted": False}},
        "internalToken": {"secretName": "token"},
        "componentTls": {"verifier": "v", "drafter": "d"},
    }
    made = render(values)
    assert {name: each["maxReplicas"] for name, each in groups(made).items() if name == "drafting"} == {"drafting": 0}
    over, offer = in_manifests(text(values), "-")
    preflight_in_pods(load(over=over, environ={}), offer)
    with refuses(ConfigurationError, field="cluster.tls", value="null"):
        over, offer = in_manifests(text(values | {"componentTls": {}}), "-")
        preflight_in_pods(load(over=over, environ={}), offer)


@needs_helm
def test_the_demo_would_start_here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`outrider plan --config` takes the ConfigMap's file as it is, where its volume is mounted."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "outrider.yaml"
    file.write_text(one(render("cpu-demo"), "ConfigMap", "-settings")["data"]["outrider.yaml"])
    here = load(
        file, [f"model={tiny_model}", f"cache_dir={tmp_path}", "server.port=0", "server.http_port=0", "server.ops_port=0"]
    )
    assert preflight(here) == ()


@needs_helm
def test_pods_follow_from_the_settings() -> None:
    counts = {
        name: {
            group: (each["minReplicas"], each["maxReplicas"])
            for group, each in groups(render(name)).items()
            if group != "head"
        }
        for name in PROFILES
    }
    assert counts == {
        "cpu-demo": {"router": (1, 1), "drafting": (1, 1), "verifier": (1, 1)},
        "one-h100": {"router": (1, 1), "drafting": (1, 1), "verifier": (1, 1)},
        # Two verifiers of four ranks share a node; eight need four nodes.
        "eight-h100-two-tp4": {"router": (2, 2), "drafting": (2, 2), "verifier": (1, 4)},
        "eight-h100-tp8": {"router": (2, 2), "drafting": (2, 2), "verifier": (1, 4)},
        # Two stages of eight ranks need two nodes.
        "multi-node": {"router": (2, 2), "drafting": (2, 2), "verifier": (2, 2)},
        "locked-down": {"router": (2, 2), "drafting": (1, 1), "verifier": (1, 1)},
    }
    placed = {name: load(over=settings(render(name)), environ={}) for name in ("eight-h100-tp8", "multi-node")}
    assert {name: each.cluster.placement.stages for name, each in placed.items()} == {
        "eight-h100-tp8": "STRICT_PACK",
        "multi-node": "PACK",
    }
    assert {name: each.verifier.stage_host for name, each in placed.items()} == {
        "eight-h100-tp8": "127.0.0.1",
        "multi-node": "0.0.0.0",
    }


@needs_helm
@pytest.mark.exhaustive
def test_a_model_whose_layers_have_states_fits_four_gpus(tmp_path: Path) -> None:
    """Qwen3-Next-80B, a stage for each GPU: how often states are kept arrives, and counts among what its pods must hold."""
    sizes = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "max_position_embeddings": 262144}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "dtype": "bfloat16"}))
    kept = []
    for every in (512, 256):
        stages = {"tensor_parallel_size": 1, "stages": 4, "kv_cache_tokens": 65536, "mamba_block_size": every}
        values = {"settings": {"verifier": stages}, "groups": {"verifier": {"gpus": 4}}}
        over, offer = in_manifests(text("eight-h100-tp8", values), "-")
        rendered = load(over=over, environ={})
        preflight_in_pods(rendered, offer)
        (only,), _, _ = split(rendered.model_copy(update={"model": str(tmp_path)}), "4xH100")
        assert only.plan.free > 0
        kept.append(only.plan.states)
    # In each of 36 layers, 128 states more: a delta rule's, and a convolution's.
    assert kept[1] - kept[0] == pytest.approx(128 * 36 * 4 * (32 * 128 * 128 + 3 * 8192) / 4, rel=1e-6)


def test_no_profile_on_gpus_is_served_by_kernels_that_are_not_exact() -> None:
    """One process names them; of several ranks `auto` takes no others (``use_gpu_kernels``)."""
    asked = {}
    for name in PROFILES:
        verifier = yaml.safe_load((CHART / "profiles" / f"{name}.yaml").read_text())["settings"]["verifier"]
        if verifier.get("device") == "cuda":
            asked[name] = (verifier.get("tensor_parallel_size"), verifier["kernels"], verifier["attention_backend"])
    assert asked == {
        "one-h100": (None, "cublaslt", "triton"),
        "eight-h100-tp8": (8, "auto", "triton"),
        "eight-h100-two-tp4": (4, "auto", "triton"),
        "multi-node": (8, "auto", "triton"),
    }


@needs_helm
def test_what_yaml_and_go_make_of_numbers_and_nulls() -> None:
    given = {
        "verifier": {
            "kv_cache_tokens": 10_000_000, "kept_feature_bytes": 2**33, "max_step_s": 0.25, "max_model_len": None,
            "override_generation_config": {"min_p": None, "temperature": 0.7},
        },
        "drafter": {"models": []},
    }  # fmt: skip
    made = settings(render({"settings": given}))
    assert {key: made["verifier"][key] for key in given["verifier"]} == given["verifier"]
    assert made["drafter"]["models"] == []
    assert settings(render({"service": {"http": False}}))["server"]["http_port"] is None


@needs_helm
def test_the_api_is_open_only_with_keys() -> None:
    assert settings(render())["server"]["host"] == "127.0.0.1"
    keys = settings(render(apiKeys={"secretName": "keys"}))["server"]
    assert (keys["host"], keys["keys_file"]) == ("0.0.0.0", "/etc/outrider/keys/keys.yaml")
    hashes = settings(render(settings={"server": {"api_key_hashes": ["a" * 64]}}))["server"]
    assert hashes["host"] == "0.0.0.0"


def test_generated_files_are_fresh() -> None:
    again = "write them with: python -m k8s.values_reference"
    assert (CHART / "values.schema.json").read_text(encoding="utf-8") == schema_text(), again
    readme = (CHART / "README.md").read_text(encoding="utf-8")
    assert readme == with_table(readme), again


def leaves(tree: dict[str, Any], path: str = "") -> list[str]:
    """Paths of a tree."""
    found = []
    for key, value in tree.items():
        found.append(f"{path}{key}")
        if isinstance(value, dict) and path != "settings.":
            found += leaves(value, f"{path}{key}.")
    return found


def test_every_value_is_documented_and_bounded() -> None:
    said = meanings()
    paths = [path for path in leaves(values()) if not path.startswith(("settings.", "monitoring.dashboards.labels."))]
    common = {re.sub(rf"^groups\.({'|'.join(GROUPS[1:])})\.", "groups.head.", path) for path in paths}
    assert common == set(said)
    table = with_table((CHART / "README.md").read_text(encoding="utf-8"))
    assert all(f"`{path}`" in table for path in common)
    # A bound of a value that there is not would bound nothing.
    for pattern in BOUNDS:
        assert any(re.fullmatch(re.escape(pattern).replace(r"\*", r"\w*"), path) for path in paths), pattern


def nothing_passes_unseen(node: Any, path: str = "") -> None:
    """Every object of the schema says what it may hold."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "object" and path not in ("global",):
        free = (
            "affinity",
            "override_generation_config",
            "tolerations",
            "podSelector",
            "namespaceSelector",
            "ipBlock",
            "extraEgress",
        )
        assert "additionalProperties" in node or path.rsplit(".", 1)[-1] in free, path
    for name, below in node.get("properties", {}).items():
        nothing_passes_unseen(below, f"{path}.{name}".lstrip("."))


def test_the_schema_is_strict_and_holds_every_setting() -> None:
    whole = schema()
    nothing_passes_unseen(whole)
    mine = whole["properties"]["settings"]["properties"]
    for section, field in Settings.model_fields.items():
        kind: Any = field.annotation
        for name in getattr(kind, "model_fields", {}):
            assert (f"{section}.{name}" in OWN) == (name not in mine[section]["properties"]) or name in ("placement",)
    assert set(Settings.model_fields) - set(mine) == {path for path in OWN if "." not in path}
    assert mine["cluster"]["properties"]["placement"]["properties"].keys() == {"patience_s"}
    # Helm reads draft 7, and references within would have no place to point to.
    assert "$ref" not in json.dumps(whole)


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("2", 2),
        ("500m", 0.5),
        ("1.5", 1.5),
        ("4Gi", 4 * 2**30),
        ("100k", 1e5),
        ("2M", 2e6),
        ("1Ti", 2**40),
        ("512Mi", 2**29),
    ],
)
def test_amounts_of_kubernetes_are_numbers(written: str, means: float) -> None:
    assert amount(written) == means


def test_an_offer_that_is_none() -> None:
    with refuses(ConfigurationError, field="storage", value="unset"):
        read_offer({}, "pods.yaml")
    good = yaml.safe_load("{pods: [1, 1], cpu: '1', memory: 1Gi, shared_memory: 1Mi}")
    content = {"storage": {"path": "/x"}, "groups": dict.fromkeys(("router", "drafting", "verifier"), good)}
    assert read_offer(content, "pods.yaml").groups.router.gpus == 0
    content["groups"]["router"] = good | {"memory": "1GB"}
    with refuses(ConfigurationError, field="groups.router.memory", value="'1GB'"):
        read_offer(content, "pods.yaml")
