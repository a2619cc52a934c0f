"""The command line as a whole: its commands in groups, JSON for programs, errors in one line, and what it imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench.contestants import check_names
from benchmarks.bench.tables import Table
from benchmarks.bench.tables import as_object as table_object
from cli import bench_commands
from cli.main import _check_request, app
from cli.scraping import Reading
from cli.top import as_object
from cluster.process.terminal import explain
from cluster.settings.config import load
from outrider.errors import InvalidArgument as ClientInvalidArgument
from speculation.errors import ConfigurationError, InvalidArgument, Unavailable
from tests.running.refusals import refuses

RUN = CliRunner()
ROOT = Path(__file__).parents[3]


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


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_wrong_requests_are_refused_before_a_model_is_loaded() -> None:
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


@pytest.mark.examples(2)
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


def test_paragraphs_of_help_are_as_wide_as_the_terminal() -> None:
    shown = RUN.invoke(app, ["bench", "soak", "--help"], env={"COLUMNS": "80"}).stdout
    lines = [line.strip() for line in shown.splitlines()]
    told = " ".join(lines[: lines.index(next(line for line in lines if line.startswith("╭")))])
    paragraph = told[told.index("Two routers") :].split("  ")[0]
    # A short line within a paragraph is one that was broken twice.
    within = [line for line in lines if line and line in paragraph][:-1]
    assert len(within) > 3 and all(len(line) > 60 for line in within)


def test_the_nearest_name_is_asked_for() -> None:
    settings = load(flags=["model=none"], environ={})
    for field, options in (("speculation.strategy", {"strategy": "sufix"}), ("speculation.sources", {"sources": ["sufix"]})):
        with refuses(InvalidArgument, field, "sufix", allowed="(did you mean suffix?)"):
            _check_request(settings, "x", options)  # type: ignore[arg-type]
    with refuses(ConfigurationError, "--strategies", says="(did you mean suffix?)"):
        check_names(["sufix"], [])
