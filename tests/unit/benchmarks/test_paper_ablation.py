"""FSPAD's Table 3 and Figure 3 are made of training runs that belong together; others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.papers import fspad
from benchmarks.papers.ablation import ablation_notes
from benchmarks.papers.page import write_page
from benchmarks.papers.run import measure_units
from benchmarks.papers.trained_runs import TrainedRun
from cli.paper_ablation import trained_runs
from cluster.models.target import ResolvedModel
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses
from tests.unit.benchmarks.test_papers import Counting, folder, row, section, silent
from training.data_folder import weights_digest
from training.data_manifest import DataManifest, write_manifest
from training.export import EVALUATION
from training.recipe import load_recipe
from training.snapshots import RunState, find_snapshot, write_snapshot

RECIPES = ("eagle_matched", "fspad_alignment_only", "fspad_sampler_only", "fspad")
Make = Callable[..., Path]


@pytest.fixture
def model(target: Path) -> ResolvedModel:
    return ResolvedModel(name="tiny", path=target)


@pytest.fixture
def make(target: Path, data: tuple[Path, DataManifest], tmp_path: Path) -> Make:
    """Makes the folder of a run as ``outrider train run`` leaves it, without what it has learnt."""

    def made(
        name: str, recipe: str = "fspad", *, step: int = 4, state: dict[str, Any] | None = None, **changed: Any
    ) -> Path:
        out = tmp_path / "runs" / name
        recipe_now = load_recipe(recipe, **{"steps": 4, **changed}).model_dump(mode="json")
        told: dict[str, Any] = {
            "step": step, "rows": 100, "recipe": recipe_now, "data": "d" * 64, "target": weights_digest(target),
            "vocabulary": "c" * 64, "layers": (-1,), "best_step": step, "best_score": 1.25 + recipe_now["seed"] / 4,
        }  # fmt: skip
        write_snapshot(out, RunState(**{**told, **(state or {})}), {"a": torch.ones(2)}, {})
        write_manifest(out, data[1])
        lines = [
            {"step": n, "acceptance": n / 10, "losses": {"divergence": 3.0 / n, "states": 0.5}} for n in range(1, step + 1)
        ]
        (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return out

    return made


def test_runs_are_read_from_their_folders(make: Make, model: ResolvedModel, tmp_path: Path) -> None:
    # By their recipes, whatever the folders are called.
    folders = [make(f"{number}", RECIPES[number // 2], seed=1 + number % 2) for number in range(8)]
    (find_snapshot(folders[0]) / EVALUATION).write_text(json.dumps({"domains": {"all": {"overlap": [0.375, 0.25]}}}))
    runs = trained_runs(folders, model, tmp_path)
    assert [run.name for run in runs] == [f"{recipe}-{n}" for recipe in RECIPES for n in (1, 2)]
    assert [run.held_out for run in runs] == [1.5, 1.75] * 4
    assert [run.accepted for run in runs] == [0.375, *[None] * 7]
    assert runs[0].losses == {"step": [1, 2, 3, 4], "divergence": [3.0, 1.5, 1.0, 0.75], "states": [0.5] * 4}
    assert runs[0].acceptance == {"step": [1, 2, 3, 4], "acceptance": [0.1, 0.2, 0.3, 0.4]}
    assert trained_runs([], model, tmp_path) == []


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"steps": 3, "step": 3}, "recipe's steps is 3"),
        ({"learning_rate": 0.5}, "recipe's learning_rate is 0.5"),
        ({"state": {"vocabulary": "e" * 64}}, "vocabulary is eee"),
        ({"state": {"start": {"weights_sha256": "f" * 64}}}, "beginning is fff"),
        ({"intermediate_size": 7}, "recipe's intermediate_size is 7"),
        ({"step": 2}, "2 of its 4 steps"),
        ({"state": {"target": "b" * 64}}, "of a target with the hash bbb"),
        ({"recipe": "medusa"}, "kind medusa"),
        ({"seed": 1}, "same recipe and seed"),
    ],
    ids=lambda each: str(each) if isinstance(each, str) else "",
)
def test_runs_that_do_not_belong_together_are_refused(
    other: dict[str, Any], says: str, make: Make, model: ResolvedModel, tmp_path: Path
) -> None:
    runs = [make("first", seed=1), make("other", **{"seed": 2, **other})]
    with refuses(ConfigurationError, field="--ablation", value="other", says=says):
        trained_runs(runs, model, tmp_path)


def test_other_data_and_no_run_are_refused(
    make: Make, model: ResolvedModel, data: tuple[Path, DataManifest], tmp_path: Path
) -> None:
    first, other = make("first", seed=1), make("other", seed=2)
    fewer = data[1].model_copy(update={"shards": data[1].shards[:1]})
    write_manifest(other, fewer)
    with refuses(ConfigurationError, field="--ablation", value="other", says="its data is"):
        trained_runs([first, other], model, tmp_path)
    with refuses(ConfigurationError, field="--ablation", value="nothing", says="holds no run"):
        trained_runs([tmp_path / "nothing"], model, tmp_path)


def _measured(runs: Sequence[TrainedRun], at: Path) -> None:
    """The runs' rows, as decoders that take two tokens a pass would give them."""
    units = []
    for run in runs:
        told = {"row": list(run.row), "held_out": run.held_out, "accepted": run.accepted, "parameters": 7_000}
        extra = {"ablation": told, "losses": run.losses, "acceptance": run.acceptance}
        for ending in ("", "-sampled"):
            made = row(Counting(), f"ablation-{run.name}{ending}")
            units.append(
                replace(made, label={3: "FSPAD", 0: "w/o both"}[2 * run.row[0] + run.row[1]], extra=lambda e=extra: e)
            )
    measure_units(units, folder(at, *units), silent)


def test_table_3_and_figure_3(make: Make, model: ResolvedModel, tmp_path: Path) -> None:
    folders = [make(f"{recipe} {n}", recipe, seed=n) for recipe in ("fspad", "eagle_matched") for n in (1, 2)]
    runs = trained_runs(folders, model, tmp_path)
    _measured(runs, tmp_path / "run")
    write_page(tmp_path / "page.md", [section(tmp_path / "run", fspad.PAPER)], [], tmp_path / "plots")
    text = (tmp_path / "page.md").read_text()
    assert "Table 3: the parts one by one, greedy" in text and "Table 3: the parts one by one, temperature 1" in text
    # As the paper orders them; of two runs each, of three answers.
    wanted = "| 2 | 3.00x ± 0.00 | 2.00 ± 0.00 | 1.0 ± 0.0 | 1.625 ± 0.177 | – | 7,000 | 6 of 6 |"
    assert text.index(f"| w/o both {wanted}") < text.index(f"| FSPAD {wanted}")
    for name, parts in (("losses", ("divergence", "states")), ("acceptance", ("acceptance",))):
        drawn = (tmp_path / "plots" / f"fspad-ablation-{name}.svg").read_text()
        assert all(f"{label}: {part}" in drawn for label in ("FSPAD", "w/o both") for part in parts)
    notes = " ".join(ablation_notes(runs))
    assert "4 steps of 4,096 positions on 48 answers" in notes and "(100 predictions); seeds 1, 2." in notes
    assert "no row of fspad_sampler_only" in notes and "no row of fspad:" not in notes
    assert "--ablation RUN" in " ".join(ablation_notes([]))
