"""``outrider bench`` as a user runs it: real processes, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from services.router.strategies import StrategyConfig, served
from tests.e2e.conftest import Command
from tests.running.processes import is_worker

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]

OUTRIDER = str(Path(sys.executable).parent / "outrider")
SMALL = ["--set", "verifier.max_model_len=512", "--set", "verifier.kv_cache_tokens=4096", "--set", "verifier.threads=1",
         "--set", "verifier.budget=fixed"]  # fmt: skip


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [OUTRIDER, "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [
        {"question_id": 1, "category": "copy", "turns": ["the quick brown fox, the quick brown fox, the", "again"]},
        {"question_id": 2, "category": "talk", "turns": ["prompt lookup copies"]},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


@pytest.fixture
def crashing_python(tmp_path: Path) -> Path:
    """An interpreter in whose environment vLLM is installed, and crashes."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "cannot allocate 80 GiB" >&2\nexit 9\n')
    script.chmod(0o755)
    return script


def test_a_whole_run(outrider_here: Command, tiny_model: Path, tmp_path: Path, prompts: Path, crashing_python: Path) -> None:
    out = tmp_path / "out"
    done = bench(
        "--model", str(tiny_model), "--prompts", str(prompts), "--max-tokens", "12", "--repeats", "2", "--concurrency", "1,2",
        "--peers", "hf,hf_prompt_lookup,hf_assisted,vllm,llamacpp", "--assistant", str(tiny_model),
        "--peer-python", f"vllm={crashing_python}", "--effort", "paper", "--out", str(out), *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["effort"] == "paper"
    named = {
        each["contestant"]: {source for source, counts in each["loop"]["named"].items() if counts["answers"]}
        for each in results["summary"] if each["loop"]
    }  # fmt: skip
    assert (named["blend"], named["autoregressive"]) == ({"suffix and recycling"}, set())
    states = {name: (entry["status"], entry["note"]) for name, entry in results["contestants"].items()}
    assert [state for state, _ in states.values()] == ["measured"] * (len(served(StrategyConfig())) + 3) + ["no part"] * 2
    assert "crashed with exit code 9: cannot allocate 80 GiB" in states["vllm"][1]
    assert "--gguf" in states["llamacpp"][1]
    assert all(check["equal"] == check["answers"] for check in results["lossless"]["checks"])
    assert {check["against"] for check in results["lossless"]["checks"]} == {"plain", "hf"}
    assert results["environment"]["threads"] == 1
    assert str(prompts) in results["settings"]["command"]
    assert not results["partial"]
    page = (out / "report.html").read_text()
    plots = len(list((out / "plots").glob("*.svg")))
    # Acceptance has no plot where nothing was accepted: a random model rarely says what was said before.
    assert page.count("<svg") == plots >= 3
    # Self-contained: nothing is fetched from anywhere.
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert (out / "report.md").read_text().count("![") == plots
    lines = [json.loads(line) for line in (out / "traces.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert [token["id"] for token in line["run"]["tokens"]] == line["output_ids"]
        assert sum(each["committed"] for each in line["run"]["passes"]) == len(line["output_ids"])
    assert "crashed" in (out / "report.md").read_text()
    compared = outrider_here("bench", "compare", str(out), str(out))
    assert compared.returncode == 0
    assert "same within the spread" in compared.stdout
    replayed = outrider_here("replay", str(out), "--budgets", "8")
    assert replayed.returncode == 0, replayed.stderr
    # The same drafter on the same answers saves the same passes, with a model or without.
    measured = next(r for r in results["summary"] if (r["contestant"], r["concurrency"]) == ("prompt_lookup", 1))
    row = next(line for line in replayed.stdout.splitlines() if "prompt_lookup" in line)
    assert float(row.split("│")[3]) == pytest.approx(measured["tau"], abs=0.006)


def test_on_ray_wants_a_ray_of_its_own(outrider_here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    done = outrider_here("bench", "--on", "ray", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "unset RAY_ADDRESS" in done.stderr


def test_ctrl_c_keeps_what_was_measured(tiny_model: Path, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    command = [
        OUTRIDER, "bench", "--model", str(tiny_model), "--prompts", str(prompts), "--max-tokens", "12", "--repeats", "200",
        "--strategies", "prompt_lookup", "--peers", "none", "--out", str(out), *SMALL,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        workers: list[psutil.Process] = []
        while not workers:
            time.sleep(0.2)
            workers = [c for c in psutil.Process(process.pid).children() if is_worker(c)]
        # It says when it has a tenth of all.
        assert process.stdout is not None
        while not process.stdout.readline().startswith("Measured"):
            assert process.poll() is None
        # As a terminal does: the whole foreground group is told.
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Interrupted" in said
    results = json.loads((out / "results.json").read_text())
    assert results["partial"]
    assert results["cells"]
    assert "partial" in (out / "report.html").read_text()
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl: cannot be read"),
        (["--strategies", "nope"], "--strategies: there is no 'nope'"),
        (["--peers", "gpt"], "--peers: there is no 'gpt'"),
        (["--out", "."], "--out is .: it exists"),
        (["--concurrency", "1,x"], "--concurrency is 1,x"),
        (["--peers", "hf_assisted", "--assistant", "nowhere"], "--assistant is nowhere"),
        (["--peer-python", "vllm=nowhere"], "--peer-python is vllm=nowhere"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(
    outrider_here: Command, arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = outrider_here("bench", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
