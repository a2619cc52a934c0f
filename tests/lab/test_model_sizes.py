"""The table of model sizes: what stands in it, and where it is written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.inflate import Size, inflate
from lab.model_sizes import HEADING, PROMPTS, SHAPES, Bench, put_into, section, table

pytestmark = pytest.mark.exhaustive

TASKS = {task: {"speed_up": {"values": [1.2, 1.3]}} for task in PROMPTS}
RESULTS: dict[str, Any] = {
    "summary": [
        {"contestant": "autoregressive", "latency": {"itl_median_s": 0.25}, "tasks": {}, "speed_up": {}, "tau": 1.0},
        {
            "contestant": "auto", "latency": {"itl_median_s": 0.1}, "tasks": {**TASKS, "list": {"speed_up": {"values": []}}},
            "speed_up": {"autoregressive": {"values": [1.4, 1.5]}}, "tau": 1.75,
        },
    ],
    "lossless": {"checks": [{"against": "plain", "answers": 6, "equal": 5}, {"against": "hf", "answers": 6, "equal": 0}]},
}  # fmt: skip


def test_a_row_for_each_size_also_where_the_time_was_up() -> None:
    made = table({"1": RESULTS, "7": None}, "auto")
    assert made.rows == (
        ("1 billion", "250 ms", "1.75", "1.45x (1.40–1.50)", "1.25x (1.20–1.30)", "–", "1.25x (1.20–1.30)", "1"),
        ("7 billion", "no time", "–", "–", "–", "–", "–", "–"),
    )
    assert all(len(row) == len(made.columns) for row in made.rows)
    partial = {**RESULTS, "summary": RESULTS["summary"][:1]}
    assert table({"7": partial}, "auto").rows[0][1] == "no time"


def test_the_section_takes_the_place_of_an_earlier_one() -> None:
    made = section(table({"1": RESULTS}, "auto"), "How.")
    page = "# Page\n\nText.\n"
    once = put_into(page, made)
    assert once == f"# Page\n\nText.\n\n{made}"
    assert put_into(once, made) == once
    between = f"{once}\n## Behind\n\nMore.\n"
    assert put_into(between, made) == between
    assert put_into(page, made).count(HEADING) == 1


def test_the_shapes_have_the_parameters_that_they_are_named_for() -> None:
    default = Size(width=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_size=64)
    for size, shape in SHAPES.items():
        grown = default.filled(shape.width, shape.intermediate, shape.layers)
        layer = sum(torch.Size(each).numel() for each in grown.shapes().values())
        total = grown.layers * layer + 49152 * grown.width
        assert round(total / 1e9, 1 if size == "0.1" else 0) == float(size)


def test_a_bench_is_run_and_ends_in_time(tiny_model: Path, tmp_path: Path) -> None:
    inflate(tiny_model, tmp_path / "model", width=160, intermediate=300, layers=5, dtype=torch.bfloat16)
    bench = Bench(strategy="auto", tokens=4, ends=time.monotonic() + 300)
    results = bench.measured(tmp_path / "model", tmp_path / "out")
    assert results is not None and not results["partial"]
    (row,) = table({"1": results}, "auto").rows
    assert row[1].endswith(" ms") and row[-1] == "0"
    late = Bench(strategy="auto", tokens=4, ends=time.monotonic()).measured(tmp_path / "model", tmp_path / "late")
    assert late is None or (late["partial"] and table({"1": late}, "auto").rows[0][1] == "no time")
    assert json.loads((tmp_path / "out/results.json").read_text())["settings"]["repeats"] == 2
