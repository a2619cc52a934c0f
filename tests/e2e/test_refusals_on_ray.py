"""What starts on Ray and what does not: stale files of another Ray, a replica that refuses, two services on one Ray."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider import Client
from tests.running.patience import PATIENCE_S
from tests.running.ports import free_port
from tests.tiny_models.draft_models import draft_beside, make_broken_draft
from tests.tiny_models.trained_heads import make_useless_head

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
SMALL = [
    "verifier.max_model_len=512", "verifier.kv_cache_tokens=4096", "verifier.threads=1", "verifier.budget=fixed",
    "verifier.num_cpus=0.25", "drafter.keep_calibration=false",
]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"COLUMNS": "200"} | more


def serve(model: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    flags = [part for flag in SMALL for part in ("--set", flag)]
    return subprocess.Popen(
        [str(BIN / "outrider"), "serve", "--model", str(model), *flags, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
    )


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    assert " at " in line, server.stderr.read() if server.stderr else line
    return line.split(" at ")[1].split()[0]


def stop(server: subprocess.Popen[str], number: int = signal.SIGTERM) -> None:
    server.send_signal(number)
    assert server.wait(timeout=PATIENCE_S) == 0


def refusal(server: subprocess.Popen[str]) -> str:
    """The one line after what is told while it starts."""
    _, told = server.communicate(timeout=240)
    assert server.returncode == 2, told
    lines = [line for line in told.splitlines() if line.strip()]
    assert len(lines) == 2, told
    assert lines[0].startswith("Starting ")
    return lines[1]


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Ray's sockets lie in it: their paths may not be long."""
    folder = tempfile.mkdtemp(prefix="or-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_replica_that_refuses_gives_its_own_reason(tiny_model: Path, tmp_path: Path, short_folder: str) -> None:
    """On a Ray of its own: what another one left behind is not followed."""
    stale = Path(short_folder) / "ray" / "ray_current_cluster"
    stale.parent.mkdir()
    stale.write_text("127.0.0.1:1")
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    # What only the verifier sees, when it has built the model.
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    told = refusal(serve(model, "--port", "0", RAY_TMPDIR=short_folder))
    assert "mlp.down_proj.weight is (64, 128), its configuration says (64, 64) and 5 more" in told


def test_ctrl_c_while_ray_starts_leaves_nothing_behind(tiny_model: Path, short_folder: str) -> None:
    server = serve(tiny_model, "--port", "0", RAY_TMPDIR=short_folder)
    while not list(Path(short_folder).glob("ray-*/ray")):
        time.sleep(0.1)
    time.sleep(1)
    server.send_signal(signal.SIGINT)
    _, told = server.communicate(timeout=240)
    assert server.returncode == 130
    assert "Traceback" not in told


@pytest.fixture
def ray(short_folder: str) -> Iterator[dict[str, str]]:
    """A Ray that runs already, with a token; what a process needs to join it."""
    port = free_port()
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": short_folder}
    head = [
        str(BIN / "ray"), "start", "--head", "--num-cpus=4", f"--port={port}", "--include-dashboard=false", "--block",
        "--node-ip-address=127.0.0.1", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0",
    ]  # fmt: skip
    process = subprocess.Popen(head, env=environment(**variables), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    yield variables | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    # No service is left, and it takes half a minute to leave in peace.
    for each in (*psutil.Process(process.pid).children(recursive=True), process):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(timeout=PATIENCE_S)


def test_two_services_on_one_ray(tiny_model: Path, tmp_path: Path, ray: dict[str, str]) -> None:
    """A model drafts in the drafter's process of one and in the verifier's of the other; those that cannot be used stop the start."""

    def start(place: str, model: Path, *arguments: str) -> subprocess.Popen[str]:
        flags = (f"drafter.models=[{model}]", f"drafter.models_in={place}", "verifier.draft_deadline_s=10")
        return serve(tiny_model, "--port", "0", *(part for flag in flags for part in ("--set", flag)), *arguments, **ray)

    stranger = ray | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    _, told = serve(tiny_model, "--port", "0", **stranger).communicate(timeout=240)
    assert "that Ray refuses our token" in told
    assert len(told.splitlines()) == 1
    first = start("drafter", draft_beside(tiny_model))
    one = address_of(first)
    assert "cluster.name is outrider: an application of this name runs on this Ray" in refusal(
        serve(tiny_model, "--port", "0", **ray)
    )
    second = start("verifier", draft_beside(tiny_model), "--name", "two")
    other = address_of(second)
    expected = drafted_answers(one)
    stop(first)
    assert drafted_answers(other) == expected
    stop(second, signal.SIGINT)
    broken = make_broken_draft(tiny_model, tmp_path / "broken")
    said = f"cannot load the draft model at {broken}: model.norm.weight holds infinite values or NaN"
    assert said in refusal(start("drafter", broken))
    useless = make_useless_head(tiny_model, tmp_path / "useless")
    assert f"cannot use the head at {useless}" in refusal(start("verifier", useless))


def drafted_answers(address: str) -> list[tuple[int, ...]]:
    """The answer decoded greedily and the sampled one, plainly and with enough of a model's drafts: those are the same."""
    found = []
    with Client(address) as client:
        (model,) = client.models()
        assert model.default_strategy == "auto" and "draft_model" in model.strategies
        for temperature in (0.0, 0.8):
            options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "temperature": temperature, "seed": 7}
            plain = client.generate("the quick", strategy="autoregressive", **options).token_ids
            deadline, drafted = time.monotonic() + PATIENCE_S, 0
            # A model's first drafts take longer, and nobody waits for them.
            while drafted < 40:
                assert time.monotonic() < deadline, (temperature, drafted)
                answer = client.generate("the quick", strategy="draft_model", **options)
                assert answer.token_ids == plain
                drafted = answer.speculative_decoding.num_draft_tokens
            found.append(plain)
    return found
