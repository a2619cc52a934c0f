"""What would not start is refused beforehand, in one line that names setting, value and what is allowed."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import pytest
import trustme

from cli import plan_report as report
from cluster.checks import host, preflight
from cluster.models.target import ResolvedModel
from cluster.ray import address as ray_address
from cluster.ray import starting
from services.api.config import PublicServerConfig, TlsFiles
from services.api.sockets import check_server
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError, OutriderError
from tests.running.refusals import refuses
from tests.tiny_models.preflights import refused, settings_of


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_what_would_start_is_let_through(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path)
    assert preflight.preflight(settings) == ()
    assert preflight.preflight(settings, ResolvedModel(name="x", path=model)) == ()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["server.host=0.0.0.0"], ("server.host", "0.0.0.0")),
        (["server.host=no-such-host.invalid"], ("no-such-host.invalid:0",)),
        (["drafter.host=192.0.2.1"], ("drafter.host", "192.0.2.1")),
        (["retrieval.index=/nowhere"], ("/nowhere",)),
        (["retrieval.index=x", "retrieval.redis_url=redis://x"], ("retrieval.index and retrieval.redis_url",)),
        (["retrieval.semantic=true"], ("retrieval.semantic", "true")),
        (["router.strategy=magic"], ("router.strategy", "magic")),
        (["verifier.device=tpu"], ("verifier.device", "tpu")),
        (["verifier.kv_cache_tokens=100000000000"], ("model",)),
        (["verifier.stages=3"], ("verifier.stages", 3)),
        (["verifier.stage_host=x"], ("verifier.stage_host", "x")),
        (["verifier.max_model_len=100000"], ("verifier.max_model_len", 100000)),
        (["verifier.max_model_len=500", "verifier.kv_cache_tokens=128"], ("verifier.max_model_len", 500)),
        (["model=/nowhere"], ("model", "/nowhere")),
        (["model=nowhere.gguf"], ("model", "nowhere.gguf")),
        (["model=a/b/c"], ("model", "a/b/c")),
        (["cache_dir=/proc/x"], ("cache_dir", "/proc/x")),
        (["server.tls_key=/x"], ("server.tls_certificate and server.tls_key",)),
        (["drafter.stop_policy=disco"], ("drafter.stop_policy", "disco")),
        (["drafter.stop_policy=disco", "drafter.stop_classifier=pyproject.toml"], ("pyproject.json",)),
        (["drafter.stop_classifier=a.safetensors"], ("drafter.stop_classifier", "a.safetensors")),
        (["drafter.stop_policy=entropy"], ("drafter.stop_policy", "entropy")),
        (["drafter.medusa_choices=mc_sim_7b_63"], ("drafter.medusa_choices", "mc_sim_7b_63")),
        (["drafter.medusa_choices=mc_sim_7b_64"], ("drafter.medusa_choices", "'mc_sim_7b_64'")),
        (["drafter.speculative_num_draft_tokens=60"], ("drafter.speculative_num_draft_tokens", 60)),
        (["server.port=50777", "server.ops_port=50777"], ("server.ops_port", 50777)),
    ],
)
def test_settings(flags: list[str], refusal: tuple[object, ...], model: Path, tmp_path: Path) -> None:
    with refuses(ConfigurationError, *refusal):
        preflight.preflight(settings_of(model, tmp_path, *flags))


def test_a_generation_config(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused in ``plan`` as at the start, and what is honoured is told."""
    file = model / "generation_config.json"
    file.write_text("{")
    assert "generation_config.json cannot be read (" in refused(model, tmp_path)
    file.write_text(json.dumps({"num_beams": 4, "eos_token_id": 0}))
    said = refused(model, tmp_path)
    assert "generation_config.json: num_beams is 4: a request gets one answer" in said
    with pytest.raises(ConfigurationError) as caught:
        TransformersTarget(TargetConfig(model_path=str(model), kv_cache_tokens=512, threads=1))
    assert str(caught.value) == said
    assert preflight.preflight(settings_of(model, tmp_path, "verifier.override_generation_config={num_beams: null}")) == ()
    assert preflight.preflight(settings_of(model, tmp_path, "verifier.generation_config=none")) == ()
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.5, "suppress_tokens": [7], "eos_token_id": [0, 9999]}))
    settings = settings_of(model, tmp_path, "verifier.override_generation_config={min_p: 0.25}")
    report.print_examined(report.examined_here(settings))
    printed = " ".join(capsys.readouterr().out.split())
    assert "requests that leave it open get temperature 0.5, top_k 50, min_p 0.25" in printed
    assert "logits pass through suppress_tokens [7]" in printed
    assert "eos_token_id 9999: no token of the model" in printed


def test_a_taken_port(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(model, tmp_path, f"server.port={port}")
        # It is said before the model is even looked for.
        assert "cannot listen" in refused(tmp_path / "none", tmp_path, f"server.port={port}")
        # On a Ray elsewhere it is that machine's port that counts.
        preflight.preflight(settings_of(model, tmp_path, f"server.port={port}"), here=False)


def test_tls_files(tmp_path: Path) -> None:
    authority = trustme.CA()
    now, day = datetime.now(UTC), timedelta(days=1)
    valid = {"a": {}, "b": {}, "old": {"not_after": now - day}, "early": {"not_before": now + day}}
    for name, when in valid.items():
        issued = authority.issue_cert("localhost", **when)
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "cut").write_bytes((tmp_path / "a.pem").read_bytes()[:300])

    def check(certificate: str, key: str) -> None:
        files = TlsFiles(certificate=tmp_path / certificate, key=tmp_path / key)
        check_server(PublicServerConfig(port=0, tls=files))

    check("a.pem", "a.key")
    for certificate, key, field, allowed in (
        ("a.pem", "b.key", "key", ""),
        ("text", "a.key", "certificate", "a PEM file"),
        ("a.pem", "text", "key", "a PEM file"),
        ("cut", "a.key", "certificate", "a certificate chain and its key"),
        ("missing", "a.key", "certificate", ""),
        ("old.pem", "old.key", "certificate", "valid now, 2"),
        ("early.pem", "early.key", "certificate", "valid now, 2"),
    ):
        with refuses(ConfigurationError, f"server.tls_{field}", key if field == "key" else certificate, allowed=allowed):
            check(certificate, key)


def test_devices() -> None:
    with refuses(ConfigurationError, field="verifier.device", value="cuda"):
        host.check_device("cuda", version_of=lambda _: "2.13.0+cpu", count=lambda: 2)
    with_cuda = partial(host.check_device, version_of=lambda _: "2.13.0")
    with refuses(ConfigurationError, field="verifier.device", value="cuda:0"):
        with_cuda("cuda:0", count=lambda: 0)
    with_cuda("cuda:1", count=lambda: 2)
    with refuses(ConfigurationError, field="verifier.device", value="cuda:2"):
        with_cuda("cuda:2", count=lambda: 2)
    with refuses(ConfigurationError, field="verifier.device", allowed="cuda:NUMBER"):
        with_cuda("cuda:" + "9" * 5000, count=lambda: 2)


@pytest.mark.parametrize(
    ("device", "stages", "ranks", "field", "value"),
    [
        ("cuda", 1, 4, "verifier.tensor_parallel_size", 4),
        ("cuda", 2, 2, "verifier.tensor_parallel_size", 2),
        ("cuda", 3, 1, "verifier.stages", 3),
        ("cuda:1", 1, 2, "verifier.tensor_parallel_size", 2),
    ],
)
def test_more_processes_than_gpus(device: str, stages: int, ranks: int, field: str, value: int) -> None:
    with refuses(ConfigurationError, field=field, value=value):
        host.check_gpus(device, stages, ranks, lambda: 2)
    for served in (("cuda", 1, 2), ("cuda", 2, 1), ("cuda:1", 1, 1), ("cpu", 8, 8)):
        host.check_gpus(*served, lambda: 2)


@pytest.fixture
def guarded() -> Iterator[str]:
    """A server that wants a token for every call, as Ray's does."""

    class Guard(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
            if ("authorization", "Bearer right") in [tuple(pair) for pair in details.invocation_metadata]:
                return continuation(details)
            refuse = lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")  # noqa: E731
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.server(ThreadPoolExecutor(2), interceptors=[Guard()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_a_ray_elsewhere(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    ray_address.check_ray_answers()
    assert ray_address.ray_is_here()
    for address, says in (
        ("127.0.0.1:1", "nothing answers"),
        ("here", "HOST:PORT"),
        ("here:" + "9" * 5000, "HOST:PORT"),
        (guarded, "refuses our token"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with refuses(ConfigurationError, "RAY_ADDRESS", address, says):
            ray_address.check_ray_answers(timeout_s=5)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with refuses(ConfigurationError, field="RAY_ADDRESS", says="refuses our token"):
        ray_address.check_ray_answers(timeout_s=5)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    ray_address.check_ray_answers(timeout_s=5)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert not ray_address.ray_is_here()


def test_the_reason_is_found_among_serves_lines() -> None:
    def message(kind: str, text: str) -> str:
        line = f"RuntimeError: {starting.START_FAILED}{json.dumps([kind, text])}"
        return f"The deployment failed to start 1 times in a row. Error:\nray::Serve\n  File x\n{line}\nmore"

    refusal, gone = message("ConfigurationError", 'a\nb "c"'), message("Unavailable", "the verifier is gone")
    found = starting.failure({"router": gone, "verifier": refusal}, "")
    assert isinstance(found, ConfigurationError)
    assert str(found) == 'a\nb "c"'
    found = starting.failure({"router": gone, "drafter": message("OSError", "no room")}, "")
    assert type(found) is OutriderError
    assert str(found) == "the drafter did not start: OSError: no room"
    assert str(starting.failure({"drafter": "It failed:\n the actor died\n\n"}, "x")).endswith(
        "did not start: the actor died"
    )
    assert str(starting.failure({}, "Failed to update")).endswith("Failed to update")
