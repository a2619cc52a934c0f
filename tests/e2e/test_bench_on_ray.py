"""``outrider bench --on ray`` as a user runs it, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.test_bench_cli import SMALL, bench

pytestmark = [pytest.mark.exhaustive, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


def test_on_ray_there_are_rpcs_and_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    out, prompts = tmp_path / "out", tmp_path / "prompts.txt"
    prompts.write_text("the quick brown fox, the quick brown fox, the\nprompt lookup copies")
    done = bench(
        "--model", str(tiny_model), "--prompts", str(prompts), "--max-tokens", "12", "--repeats", "1", "--on", "ray",
        "--out", str(out), *SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["on"] == "ray"
    assert all(check["equal"] == check["answers"] for check in results["lossless"]["checks"])
    drafted = next(record for record in results["summary"] if record["contestant"] == "prompt_lookup")
    assert drafted["loop"]["shares"]["rpc"] > 0
    for line in map(json.loads, (out / "traces.jsonl").read_text().splitlines()):
        assert [token["id"] for token in line["run"]["tokens"]] == line["output_ids"]
        assert sum(each["committed"] for each in line["run"]["passes"]) == len(line["output_ids"])
