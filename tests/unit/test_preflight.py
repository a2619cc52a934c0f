"""What would not start is refused beforehand, in one line that names setting, value and what is allowed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from cli import plan_report as report
from cli.main import _check_request
from cluster.checks import host, model_files, preflight
from cluster.models.target import ResolvedModel
from cluster.process.terminal import explain
from cluster.ray import address as ray_address
from cluster.ray import starting
from cluster.settings.config import Settings, load
from outrider.errors import InvalidArgument as ClientInvalidArgument
from services.api.config import PublicServerConfig, TlsFiles
from services.api.sockets import check_server
from services.model_files.weights.headers import check_weights
from services.verifier.config import TargetConfig
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError, InvalidArgument, OutriderError, Unavailable
from tests.refusals import refuses
from tests.tiny_gguf import make_tiny_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def settings_of(model: Path, tmp_path: Path, *flags: str) -> Settings:
    return load(flags=[f"model={model}", "server.port=0", f"cache_dir={tmp_path / 'cache'}", *flags], environ={})


def refused(model: Path, tmp_path: Path, *flags: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        preflight.preflight(settings_of(model, tmp_path, *flags))
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a"', "config.json cannot be read"),
        ("[]", "no JSON object"),
        ("{}", "names no model_type"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_broken_configuration(content: str | bytes, message: str, model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(model, tmp_path)


def test_broken_weights(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for content, message in (
        (whole[:-1], f"has {len(whole) - 1:,} bytes instead of {len(whole):,}: it is cut off"),
        (whole[: 8 + header // 2], "cut off in its header"),
        (b"", "is no safetensors file"),
        (b"<html>" * 10, "is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs"),
    ):
        file.write_bytes(content)
        assert message in refused(model, tmp_path)
    file.unlink()
    assert "no model.safetensors there" in refused(model, tmp_path)
    (model / "blocks.safetensors").write_bytes(whole[:-1])
    assert "blocks.safetensors has" in refused(model, tmp_path)
    (model / "blocks.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    norm = "model.norm.weight"
    index.write_text(json.dumps({"weight_map": {norm: "one.safetensors", "b": "two.safetensors"}}))
    (model / "one.safetensors").write_bytes(whole)
    assert "two.safetensors is missing" in refused(model, tmp_path)
    (model / "two.safetensors").write_bytes(whole)
    assert "two.safetensors holds no b, which model.safetensors.index.json says is there" in refused(model, tmp_path)
    index.write_text(json.dumps({"weight_map": {norm: "one.safetensors", "model.embed_tokens.weight": "two.safetensors"}}))
    preflight.preflight(settings_of(model, tmp_path))


def test_a_broken_tokenizer_and_an_empty_folder(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    assert "tokenizer.json cannot be read" in refused(model, tmp_path)
    (model / "config.json").unlink()
    assert "the folder has no config.json" in refused(model, tmp_path)


def test_gguf_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"version https://git-lfs")
    assert "pointer of git-lfs" in refused(file, tmp_path)
    file.write_bytes(b"PK\x03\x04")
    assert "no GGUF file" in refused(file, tmp_path)
    file.write_bytes(b"GGUF\x03")
    assert "is cut off in its header" in refused(file, tmp_path)
    whole = make_tiny_gguf(tmp_path / "gguf", {"ffn": "Q4_1"})
    assert preflight.preflight(settings_of(whole, tmp_path)) != ()
    data = whole.read_bytes()
    # The last tensor is padded, so that the last byte is not missed.
    file.write_bytes(data[:-64])
    assert f"has {len(data) - 64:,} bytes instead of" in refused(file, tmp_path)
    file.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gamma", 1))
    assert "its architecture is 'gamma', which transformers" in refused(file, tmp_path)


def test_memory_is_counted_from_headers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as file:
        numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    config = json.loads((model / "config.json").read_text())
    weights = model_files.count_weights(check_weights(model, config))
    assert weights.in_layers + weights.others == numbers
    assert weights.in_layers > 0
    assert weights.stored == 4
    verifier = settings_of(model, tmp_path).verifier
    # Two layers, keys and values of two heads of 16 numbers, four bytes each.
    assert (
        model_files.cache_bytes(verifier, json.loads((model / "config.json").read_text()), 16384)
        == 2 * 2 * 2 * 16 * 4 * 16384
    )
    monkeypatch.setattr(preflight, "free_memory", lambda: 4.0 * numbers + 100)
    assert "the model does not fit" in refused(model, tmp_path)


def test_a_model_of_the_hub_that_was_fetched_before(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    settings = settings_of(Path("some/model"), tmp_path)
    assert preflight.preflight(settings) != ()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refuses(ConfigurationError, field="model", value="some/model"):
        preflight.preflight(settings)
    kept = tmp_path / "hub" / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(model, kept / "snapshots" / "abc")
    assert preflight.preflight(settings) == ()
    assert preflight.model_folder(settings) == kept / "snapshots" / "abc"


def test_a_cache_that_is_full_is_found_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))
    settings = load(flags=["server.port=0", f"cache_dir={tmp_path / 'cache'}"], environ={})
    with refuses(ConfigurationError, field="cache_dir", value="cache"):
        preflight.preflight(settings)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.metadata, "version", lambda _: "2.13.0+cpu")
    with refuses(ConfigurationError, field="verifier.device", value="cuda"):
        host.check_device("cuda")
    monkeypatch.setattr(host.metadata, "version", lambda _: "2.13.0")
    monkeypatch.setattr(host, "count_gpus", lambda: 0)
    with refuses(ConfigurationError, field="verifier.device", value="cuda:0"):
        host.check_device("cuda:0")
    monkeypatch.setattr(host, "count_gpus", lambda: 2)
    host.check_device("cuda:1")
    with refuses(ConfigurationError, field="verifier.device", value="cuda:2"):
        host.check_device("cuda:2")


@pytest.mark.parametrize(
    ("device", "stages", "ranks", "field", "value"),
    [
        ("cuda", 1, 4, "verifier.tensor_parallel_size", 4),
        ("cuda", 2, 2, "verifier.tensor_parallel_size", 2),
        ("cuda", 3, 1, "verifier.stages", 3),
        ("cuda:1", 1, 2, "verifier.tensor_parallel_size", 2),
    ],
)
def test_more_processes_than_gpus(
    device: str, stages: int, ranks: int, field: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "count_gpus", lambda: 2)
    with refuses(ConfigurationError, field=field, value=value):
        host.check_gpus(device, stages, ranks)
    for served in (("cuda", 1, 2), ("cuda", 2, 1), ("cuda:1", 1, 1), ("cpu", 8, 8)):
        host.check_gpus(*served)


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
    for address, says in (("127.0.0.1:1", "nothing answers"), ("here", "HOST:PORT"), (guarded, "refuses our token")):
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


def test_wrong_requests_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    settings = load(flags=["model=none"], environ={})
    _check_request(settings, "x", {"seed": 3, "stop": "y", "strategy": "suffix"})
    with refuses(ClientInvalidArgument, field="seed", value=-1, allowed="a whole number from 0 to 18446744073709551615"):
        _check_request(settings, "x", {"seed": -1})
    for name, value, field, allowed in (
        ("top_p", 7.0, "top_p", "at most 1"),
        ("strategy", "magic", "speculation.strategy", "one of anpd"),
        ("strategy", "rest", "speculation.strategy", "this server has no retrieval index"),
        ("max_tokens", 0, "max_tokens", "a whole number from 1"),
    ):
        with refuses(InvalidArgument, field, value, allowed=allowed):
            _check_request(settings, [{"role": "user", "content": "x"}], {name: value})  # type: ignore[arg-type]


def test_errors_in_one_line(tmp_path: Path) -> None:
    def told(error: BaseException) -> tuple[str, int] | None:
        return explain(error)

    assert told(ConfigurationError("x")) == ("x", 2)
    assert told(Unavailable("x")) == ("x", 1)
    assert told(ClientInvalidArgument("x", "f")) == ("x", 2)
    with pytest.raises(OSError) as caught:
        (tmp_path / "none").read_text()
    assert told(caught.value) == (f"{tmp_path / 'none'}: No such file or directory", 2)
    assert told(OSError("odd")) == ("odd", 1)
    assert told(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) is not None
    assert told(KeyError("a bug")) is None


@pytest.mark.parametrize("arguments", [("--help",), ("plan",), ("models",), ("index", "--help")])
def test_the_command_line_imports_light(arguments: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "ray", "faiss", "redis", "scipy", "numpy", "huggingface_hub")
    script = (
        f"import sys; sys.argv = ['outrider', *{arguments!r}]\nfrom cli.main import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        f"print('imported:', [name for name in {heavy!r} if name in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OUTRIDER_"))}
    environment |= {"OUTRIDER_MODEL": str(model), "OUTRIDER_CACHE_DIR": str(tmp_path), "OUTRIDER_SERVER__PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []", done.stdout


def test_version_and_module() -> None:
    for command in (["--version"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *command], capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert "outrider" in done.stdout.lower()
