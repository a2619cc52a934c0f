"""A running server as those see it who operate it: its ops port, its numbers, its logs, its table."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import outrider
from cli.scraping import Reading, _add, read
from cli.top import show_top, tables
from cluster.models.target import ResolvedModel
from cluster.process.local_service import running_in_process
from cluster.process.logs import JsonLines
from cluster.settings.config import Settings, load
from services.api.http.ops_listener import serve_ops
from services.metrics.families import FAMILIES, PREFIX
from speculation.errors import ConfigurationError, OutriderError, Unavailable
from tests.running.ports import free_port
from tests.running.refusals import refuses
from tests.servers.promtool import PROMTOOL, promtool
from tests.servers.service import tiny_settings

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "xylophone marmalade"


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Server:
    """A server in this process that logs JSON at the lowest level."""

    def __init__(self, address: str, ops: str, settings: Settings, lines: io.StringIO) -> None:
        self.address, self.ops, self.settings, self.lines = address, ops, settings, lines


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    port = free_port()
    settings = load(flags=tiny_settings(f"server.ops_port={port}"), environ={})
    handler = logging.StreamHandler(lines := io.StringIO())
    handler.setFormatter(JsonLines())
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with running_in_process(settings, ResolvedModel(name="tiny", path=tiny_model)) as addresses:
            with outrider.Client(addresses.grpc) as client:
                for strategy in ("blend", "autoregressive", "suffix"):
                    client.generate(
                        SECRET, max_tokens=30, ignore_eos=True, strategy=strategy, request_id="mine", traceparent=TRACE
                    )
                with pytest.raises(outrider.InvalidArgument):
                    client.generate(SECRET, strategy="no such", request_id="wrong")
            yield Server(addresses.grpc, f"http://127.0.0.1:{port}", settings, lines)
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


def test_the_numbers_of_a_running_server(server: Server) -> None:
    status, text = get(f"{server.ops}/metrics")
    assert status == 200
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for f in text_string_to_metric_families(text)
        for sample in f.samples
    }
    assert told["outrider_requests_total", "OK", "length"] == 3
    assert told["outrider_requests_total", "INVALID_ARGUMENT", "refused"] == 1
    assert told["outrider_generation_tokens_total",] == 90
    assert told["outrider_num_requests_running",] == told["outrider_num_requests_open",] == 0
    assert told["outrider_ready",] == 1
    assert 0 <= told["outrider_kv_cache_usage_ratio",] < 1
    assert told["outrider_drafter_draft_seconds_count", "text"] > 0
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
        assert told[f"outrider_{name}_count",] == 3
    names = {family.name for family in text_string_to_metric_families(text)}
    assert names <= {PREFIX + name.removesuffix("_total") for name in FAMILIES}
    assert len(names) > 35
    assert SECRET not in text
    assert "mine" not in text


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here")
def test_promtool_finds_no_fault_with_them(server: Server) -> None:
    assert promtool("check", "metrics", stdin=get(f"{server.ops}/metrics")[1]) == ""


def test_health_and_readiness(server: Server) -> None:
    assert get(f"{server.ops}/health")[0] == 200
    assert get(f"{server.ops}/ready")[0] == 200
    assert get(f"{server.ops}/other")[0] == 404


async def test_readiness_asks_seldom_and_waits_for_nobody() -> None:
    asked = 0
    answers = [True, False]

    async def ready() -> bool:
        nonlocal asked
        asked += 1
        if asked > len(answers):
            raise RuntimeError("planted")
        return answers[asked - 1]

    for expected in (200, 503, 503):
        listener = await serve_ops("127.0.0.1", 0, lambda: b"x 1\n", ready)
        try:
            before = asked
            found = await asyncio.gather(*(asyncio.to_thread(get, f"http://{listener.address}/ready") for _ in range(8)))
            assert {status for status, _ in found} == {expected}
            assert asked == before + 1
        finally:
            await listener.stop()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])), timeout=5)


def test_a_taken_ops_port_is_said_before_anything_is_loaded(server: Server, tiny_model: Path) -> None:
    taken = server.settings.server.ops_port
    settings = load(flags=tiny_settings(f"server.ops_port={taken}"), environ={})
    with (
        refuses(ConfigurationError, says="for metrics"),
        running_in_process(settings, ResolvedModel(name="tiny", path=tiny_model)),
    ):
        pass


def test_the_ops_ports_default() -> None:
    def ops(*flags: str) -> int | None:
        return load(flags=flags, environ={}).server.ops

    assert (ops(), ops("server.port=0"), ops("server.port=0", "server.ops_port=77")) == (9464, 0, 77)


def test_one_place_for_numbers(tiny_model: Path) -> None:
    settings = load(flags=tiny_settings("metrics.export=ray"), environ={})
    with (
        refuses(ConfigurationError, field="metrics.export", value="ray"),
        running_in_process(settings, ResolvedModel(name="tiny", path=tiny_model)),
    ):
        pass


# --- top ----------------------------------------------------------------------------------------------------------


def test_top_shows_what_the_service_does(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    show_top([f"{server.ops}/metrics"], interval_s=0.1, once=True)
    shown = capsys.readouterr().out
    for words in (
        "requests ended",
        "tokens per pass",
        "blend",
        "recycling",
        "suffix",
        "key-value cache",
        "refused requests",
    ):
        assert words in shown, words
    before = read([f"{server.ops}/metrics"])
    with outrider.Client(server.address) as client:
        done = client.generate("fox fox fox fox", max_tokens=40, ignore_eos=True, strategy="recycling").speculative_decoding
    grown = read([f"{server.ops}/metrics"]).since(before)
    assert grown.sum("generation_tokens_total") == 40
    assert grown.sum("spec_decode_num_draft_tokens_total", strategy="recycling") == done.num_draft_tokens
    assert grown.by("accepted_by_source_total", "source").get("recycling", 0) == done.num_accepted_draft_tokens
    Console(file=(out := io.StringIO()), width=120).print(tables(before, read([f"{server.ops}/metrics"])))
    # The same number as in the answer.
    (row,) = (line for line in out.getvalue().splitlines() if "tokens per pass" in line)
    assert f" {done.mean_acceptance_length:.2f} " in row
    assert "recycling" in out.getvalue()


def test_top_shows_what_drafting_saved_and_cost() -> None:
    def reading(at: float, *saved: float) -> Reading:
        loads = (("blend", "1"), ("blend", "16-31"), ("autoregressive", "16-31"))
        samples = [
            f'outrider_spec_decode_seconds_saved{{strategy="{strategy}",requests="{load}"}} {seconds}'
            for (strategy, load), seconds in zip(loads, saved, strict=True)
        ]
        _add(found := Reading(at=at), "\n".join(["# TYPE outrider_spec_decode_seconds_saved gauge", *samples, ""]))
        return found

    now, before = reading(10.0, 8.0, -3.0, -1.0), reading(8.0, 7.5, -2.0, -0.25)
    # What drafting costs shrinks the sum: nothing was started anew.
    assert now.since(before).sum("spec_decode_seconds_saved") == pytest.approx(-1.25)
    Console(file=(out := io.StringIO()), width=160).print(tables(before, now))
    shown = [" ".join(line.replace("│", " ").split()) for line in out.getvalue().splitlines()]
    assert "saved by drafting, all answers -1.2 s +4.0 s" in shown
    assert "blend 0 - - - - -0.5 s +5.0 s" in shown
    assert "autoregressive 0 - - - - -0.8 s -1.0 s" in shown
    assert shown[-3:-1] == ["1 +0.5 s +8.0 s", "16-31 -1.8 s -4.0 s"]
    # A service that measures nothing of it says nothing of it.
    Console(file=(out := io.StringIO()), width=160).print(tables(Reading(at=1.0), Reading(at=2.0)))
    assert "requests decoded at once" not in out.getvalue()


def test_top_adds_up_what_rays_agents_say() -> None:
    def text(worker: str, count: int) -> str:
        labels = f'WorkerId="{worker}",NodeAddress="10.0.0.1",outcome="stop",code="OK"'
        usage = f'ray_outrider_kv_cache_usage_ratio{{WorkerId="{worker}"}} 0.{count}'
        return (
            f"# TYPE ray_outrider_requests_total counter\nray_outrider_requests_total{{{labels}}} {count}\n"
            f"# TYPE ray_outrider_kv_cache_usage_ratio gauge\n{usage}\n"
            f'# TYPE ray_node_cpu gauge\nray_node_cpu{{WorkerId="{worker}"}} 7\n'
        )

    now, before = Reading(at=10.0), Reading(at=8.0)
    for worker, count in (("a", 4), ("b", 5)):
        _add(now, text(worker, count))
        _add(before, text(worker, 2 * count if worker == "b" else 1))
    assert now.sum("requests_total", outcome="stop") == 9
    assert now.mean("kv_cache_usage_ratio") == pytest.approx(0.45)
    assert "node_cpu" not in now.values
    # One of them has been started anew, so what it says now has all come since.
    assert now.since(before).sum("requests_total") in (9, 9 - 11 + 11)
    with pytest.raises(OutriderError, match="Prometheus"):
        _add(now, "# TYPE x\nnot { a sample")


def test_top_says_what_is_wrong(server: Server) -> None:
    with pytest.raises(Unavailable, match="outrider serve"):
        read([f"http://127.0.0.1:{free_port()}/metrics"])
    with pytest.raises(OutriderError, match="Prometheus"):
        read([f"{server.ops}/health"])
    with pytest.raises(OutriderError, match="http"):
        read(["file:///etc/passwd"])


# --- logs ---------------------------------------------------------------------------------------------------------


def test_json_logs_name_requests_and_hold_no_prompts(server: Server) -> None:
    text = server.lines.getvalue()
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    for component in ("router", "verifier", "drafter"):
        named = [line for line in lines if line["logger"].startswith(f"services.{component}") and "request_id" in line]
        assert any(line["request_id"] == "mine" and line["trace"] == TRACE[3:35] for line in named), component
    for word in SECRET.split():
        assert word not in text


def test_a_json_line_of_an_error() -> None:
    def line(error: Exception) -> dict[str, Any]:
        try:
            raise error
        except Exception:
            import sys

            entry = logging.LogRecord(
                "a", logging.ERROR, "f", 1, "request %s: it\nbroke %d", ("my.id.0123abcd.2", 3), sys.exc_info()
            )
        return json.loads(JsonLines().format(entry))  # type: ignore[no-any-return]

    said = line(ValueError(f"cannot read {SECRET}"))
    assert (said["level"], said["message"]) == ("error", "request my.id.0123abcd.2: it\\nbroke 3")
    assert (said["request_id"], said["request"]) == ("my.id", "my.id.0123abcd.2")
    assert said["error"] == "ValueError"
    assert "test_seen_from_outside.py" in said["traceback"][0]
    assert SECRET not in json.dumps(said)
    assert line(OSError("disk full"))["error_text"] == "disk full"
