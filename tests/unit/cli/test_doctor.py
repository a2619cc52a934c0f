"""``outrider doctor`` finds what is wrong, says what to do, and lets nothing stop it."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli import doctor as doctor_checks
from cli.doctor import CHECKS, Finding, examine, findings
from cluster.checks import host
from cluster.settings.config import load
from tests.servers.service import tiny_settings


def found(name: str, *flags: str) -> list[Finding]:
    """What one check finds."""
    settings = load(flags=tiny_settings(*flags), environ={})
    return list(CHECKS[name](name, settings))


def only(name: str, *flags: str) -> Finding:
    (finding,) = found(name, *flags)
    return finding


def test_a_machine_on_which_the_tests_run_is_fit(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("python", "packages", "processor", "memory", "disk", "model", "index", "ray", "tracing"):
        for finding in found(name, f"model={tiny_model}", f"cache_dir={tmp_path}"):
            assert finding.status == "ok" or finding.advice, finding
            assert finding.status != "fail", finding
    assert str(tiny_model) in only("model", f"model={tiny_model}").found
    assert "Ray" in only("packages").found


def test_packages_that_are_missing_or_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_checks.metadata, "requires", lambda _: ["no-such-thing>=1", "numpy>=99", "x ; extra == 'gpu'", "pyyaml>=6"]
    )
    finding = only("packages")
    assert finding.status == "fail"
    assert "no-such-thing is missing; numpy is" in finding.found
    assert "pip install" in finding.advice


def test_a_taken_port() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        public, http, ops = found("ports", f"server.port={port}", "server.http_port=0", "server.ops_port=0")
        assert (public.status, http.status, ops.status) == ("fail", "ok", "ok")
        assert str(port) in public.found
        assert "server.port" in public.advice
        public, http, ops = found("ports", f"server.ops_port={port}")
        assert (public.status, http.status, ops.status) == ("ok", "ok", "fail")
        assert "server.ops_port" in ops.advice
        public, http, ops = found("ports", f"server.http_port={port}")
        assert (public.status, http.status, ops.status) == ("ok", "fail", "ok")
        assert "server.http_port" in http.advice
    assert [finding.status for finding in found("ports", "server.ops_port=null", "server.http_port=null")] == ["ok"]


def test_a_processor_and_a_clock_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "instruction_sets", list)
    assert only("processor").status == "warn"
    monkeypatch.setattr(doctor_checks, "_unsynchronised", lambda: True)
    assert only("clock").status == "warn"
    monkeypatch.setattr(doctor_checks, "time", SimpleNamespace(**{**vars(time), "time": lambda: 86400.0}))
    assert only("clock").status == "fail"


def test_torch_and_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    for printed, code, status in (("2.13.0 avx2", 0, "ok"), ("2.13.0 none: avx2: cc failed", 0, "warn"), ("", 1, "fail")):
        script = f"import sys; print({printed!r}); sys.exit({code})"
        monkeypatch.setattr(doctor_checks, "_KERNELS", script)
        finding = only("torch and kernels")
        assert finding.status == status
        assert bool(finding.advice) == (status != "ok")
        assert ("cc failed" in finding.found) == (status == "warn")


@pytest.mark.parametrize(
    "flag",
    [
        "verifier.weights=as_stored",
        "verifier.dtype=int8",
        "verifier.kernels=avx2",
        "verifier.kv_cache_dtype=fp8",
        "verifier.tensor_parallel_size=2",
    ],
)
def test_settings_that_need_kernels_fail_without_them(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_KERNELS", "print('2.13.0 none: no C compiler found')")
    (finding,) = found("torch and kernels", flag)
    assert finding.status == "fail"
    assert f"{flag.replace('=', ': ')} cannot be honoured" in finding.advice


def test_a_start_beside_an_idle_gpu_says_so() -> None:
    assert host.idle_gpus("cpu", lambda: 0) == host.idle_gpus("cuda", lambda: 2) == host.idle_gpus("cuda:1", lambda: 2) == ""
    one, two = host.idle_gpus("cpu", lambda: 1), host.idle_gpus("cpu", lambda: 2)
    assert one.startswith("An NVIDIA GPU is here and stays idle") and two.startswith("2 NVIDIA GPUs are here")
    # What it names are settings, with values that they can have.
    flags = re.findall(r"--set (\S+)", one)
    assert [load(flags=flags, environ={}).verifier.device, len(flags)] == ["cuda", 2]


def test_a_start_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "why_none", lambda: "no C compiler found")
    line = host.without_kernels("cpu", "auto")
    assert line.endswith("no C compiler found") and "several times longer" in line and "\n" not in line
    # Who names other kernels, or a GPU, knows.
    assert host.without_kernels("cpu", "onednn") == host.without_kernels("cuda", "auto") == ""
    monkeypatch.setattr(host, "why_none", str)
    assert host.without_kernels("cpu", "auto") == ""


@pytest.mark.parametrize("flag", ["server.port=PORT", "server.http_port=PORT", "server.ops_port=PORT", "router.replicas=2"])
def test_ports_are_no_matter_of_memory(flag: str, tiny_model: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert only("memory", flag.replace("PORT", port), f"model={tiny_model}").status == "ok"


def test_what_does_not_answer_or_fit_is_a_finding(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setattr(doctor_checks, "_KERNELS", "print('2.13.0 avx2')")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    flags = ("retrieval.redis_url=redis://127.0.0.1:1/0", "verifier.device=cuda:7", f"model={tiny_model}")
    settings = load(flags=tiny_settings(*flags, "verifier.kv_cache_tokens=1000000000000"), environ={})
    by_name: dict[str, list[Finding]] = {}
    for finding in findings(settings):
        by_name.setdefault(finding.check, []).append(finding)
    assert by_name.keys() == CHECKS.keys()
    for name in ("device", "memory", "index", "ray"):
        assert by_name[name][0].status == "fail", by_name[name]
    assert "RAY_ADDRESS" in by_name["ray"][0].found


def test_one_check_that_breaks_stops_no_other(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(name: str, settings: object) -> list[Finding]:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(doctor_checks, "CHECKS", {"broken": breaks, "python": CHECKS["python"]})
    settings = load(flags=tiny_settings(), environ={})
    assert examine(settings, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [(entry["check"], entry["status"]) for entry in told] == [("broken", "warn"), ("python", "ok")]
    assert examine(settings, as_json=False)
    lines = capsys.readouterr().out
    assert "warn  broken" in lines
    assert "ok    python" in lines
