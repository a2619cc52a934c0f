"""The command line as a whole: its commands in groups, and JSON for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench.tables import Table
from benchmarks.bench.tables import as_object as table_object
from cli import bench_commands
from cli.main import app
from cli.scraping import Reading
from cli.top import as_object
from speculation.errors import ConfigurationError
from tests.refusals import refuses

RUN = CliRunner()


def test_commands_stand_in_groups_and_serve_comes_first() -> None:
    shown = RUN.invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout
    titles = re.findall(r"^╭─ (\w+) ─", shown, re.MULTILINE)
    assert titles == ["Options", "Serve", "Ask", "Operate", "Measure", "Build"]
    commands = re.findall(r"^│ ([a-z][a-z-]+) ", shown, re.MULTILINE)
    assert commands[0] == "serve"
    assert set(commands) == {
        info.name or info.callback.__name__.replace("_", "-") for info in app.registered_commands if info.callback
    } | {group.name for group in app.registered_groups}


def test_models_as_json_where_no_server_is(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["models", "--json", "--set", f"cache_dir={tmp_path}", "--set", "server.port=1"])
    assert json.loads(done.stdout) == {"address": "127.0.0.1:1", "served": [], "on_this_machine": []}


def test_a_replay_as_json(tmp_path: Path) -> None:
    trace = tmp_path / "traces.jsonl"
    trace.write_text(json.dumps({"prompt_ids": [1, 2, 3, 4] * 4, "output_ids": [1, 2, 3, 4] * 4}) + "\n")
    done = RUN.invoke(
        app,
        [
            "replay",
            str(trace),
            "--strategies",
            "prompt_lookup,prompt_lookup+recycling+blend",
            "--budgets",
            "3,7",
            "--json",
            "--set",
            f"cache_dir={tmp_path}",
        ],
    )
    (table,) = json.loads(done.stdout)
    rows = [(row["strategy"], row["budget"]) for row in table["rows"]]
    assert rows == [(name, nodes) for name in ("prompt_lookup", "prompt_lookup+recycling+blend") for nodes in ("3", "7")]
    assert float(table["rows"][1]["all"]) > float(table["rows"][0]["all"]) > 1


def test_tables_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title="Speed", columns=("", "A"), rows=(("blend", "1.5"),), note="by turns")
    assert table_object(table) == {"title": "Speed", "note": "by turns", "rows": [{"name": "blend", "A": "1.5"}]}
    bench_commands._print([table], as_json=True)
    assert json.loads(capsys.readouterr().out) == [table_object(table)]


def test_top_as_json_has_every_sample_now_and_its_growth() -> None:
    labels = (("strategy", "blend"),)
    before = Reading(at=1.0, values={"drafts_total": {labels: 3.0}})
    now = Reading(at=3.0, values={"drafts_total": {labels: 5.0}, "ready": {(): 1.0}})
    assert as_object(before, now) == {
        "interval_s": 2.0,
        "samples": [
            {"name": "drafts_total", "labels": {"strategy": "blend"}, "now": 5.0, "grown": 2.0},
            {"name": "ready", "labels": {}, "now": 1.0, "grown": 1.0},
        ],
    }


def test_an_option_is_refused_by_its_own_name(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for command in (
        ["run", "--recipe", "fspad", "--data", folder, "--vocabulary", folder, "--out", folder],
        ["evaluate", folder, "--data", folder],
        ["disco", "--data", folder, "--draft", folder, "--out", f"{folder}/made.safetensors"],
    ):
        with refuses(ConfigurationError, field="--device", value="tpu"):
            RUN.invoke(app, ["train", *command, "--device", "tpu"], catch_exceptions=False)
