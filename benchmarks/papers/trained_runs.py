"""Training runs of FSPAD's head and of its parts, as the ablation reads them: which belong together, and what each is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculation.errors import ConfigurationError, spelled

OPTION = "--ablation"
# What makes a row of the recipe: feature sampler, partial alignment.
_PARTS = ("sampler", "partial_alignment")
# The inner width may differ between rows, to give all as many parameters; the seed should differ within one.
_FREE = {*_PARTS, "intermediate_size", "seed"}
_RECIPES = {"eagle_matched": (False, False), "fspad_alignment_only": (False, True), "fspad_sampler_only": (True, False)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """A run that has made its last step.

    Attributes:
        recipe: all its values.
        origin: what else it follows from, by what that is called: hashes of the target, the data and the vocabulary.
        answers, tokens: of its data; ``predictions``: those that it learnt from.
        weights: hash of the step that is exported, the best one on held-out text.
        held_out: of that step, tokens per pass of a chain on held-out text; ``accepted``: the chance there that the first
            draft is accepted. None: not measured.
        losses, acceptance: by step, see ``training.curves``.
        head: gives the folder of the exported head.
    """

    folder: Path
    recipe: Mapping[str, Any]
    origin: Mapping[str, str]
    answers: int
    tokens: int
    predictions: int
    weights: str
    held_out: float | None
    accepted: float | None
    losses: Mapping[str, Sequence[float]]
    acceptance: Mapping[str, Sequence[float]]
    head: Callable[[], Path]

    @property
    def row(self) -> tuple[bool, bool]:
        """Whether it has a feature sampler, and partial alignment."""
        sampler, alignment = (bool(self.recipe[part]) for part in _PARTS)
        return sampler, alignment

    @property
    def name(self) -> str:
        """Unique among runs that belong together."""
        recipe = next((name for name, row in _RECIPES.items() if row == self.row), "fspad")
        return f"{recipe}-{self.recipe['seed']}"


def check_together(runs: Sequence[TrainedRun]) -> None:
    """Whether runs differ in nothing but the parts of the head, and their seeds.

    Raises:
        ConfigurationError: one is of something else than the first, or as another with the same seed; names it.
    """
    by_name: dict[str, TrainedRun] = {}
    widths: dict[tuple[bool, bool], TrainedRun] = {}
    for run in runs:
        _check_same(runs[0], run, {**runs[0].origin}, {**run.origin}, "")
        _check_same(runs[0], run, _fixed(runs[0]), _fixed(run), "recipe's ")
        first, width = widths.setdefault(run.row, run), "intermediate_size"
        _check_same(first, run, {width: first.recipe[width]}, {width: run.recipe[width]}, "recipe's ")
        if (other := by_name.setdefault(run.name, run)) is not run:
            raise ConfigurationError(
                f"it is a run of the same recipe and seed as {other.folder}: leave one of them out",
                field=OPTION,
                verb="",
                value=run.folder,
            )


def _fixed(run: TrainedRun) -> dict[str, Any]:
    return {key: value for key, value in run.recipe.items() if key not in _FREE}


def _check_same(first: TrainedRun, run: TrainedRun, wanted: dict[str, Any], found: dict[str, Any], of: str) -> None:
    for key in sorted({*wanted, *found}):
        if wanted.get(key) != found.get(key):
            theirs, ours = spelled(wanted.get(key)), spelled(found.get(key))
            raise ConfigurationError(
                f"its {of}{key} is {ours}, and that of {first.folder} is {theirs}: only runs that differ in nothing "
                "but their parts and seeds tell what the parts bring",
                field=OPTION,
                verb="",
                value=run.folder,
            )
