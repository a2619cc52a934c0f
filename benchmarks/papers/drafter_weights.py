"""The weights that rows draft with: whether they are there, how to train them, how many parameters they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.papers.workbench import Workbench
from services.drafter.heads.files.kinds import Checkpoint
from speculation.errors import ConfigurationError

# The built-in recipe for each source.
_RECIPES = {
    "fspad": "fspad",
    "eagle": "eagle_matched",
    "medusa": "medusa",
    "streaming": "streams",
    "draft_model": "draft_model",
}


def how_to_train(source: str) -> str:
    """The commands that make a source's weights, and the option that names them."""
    return (
        f"outrider train run --recipe {_RECIPES[source]} --data DATA --vocabulary VOCABULARY --out RUN, then outrider train "
        "export RUN --out FOLDER, then --drafter FOLDER (docs/tutorials/own-drafter.md makes DATA and VOCABULARY)"
    )


def needed(bench: Workbench, source: str) -> Checkpoint:
    """The weights of a source without which there is no experiment.

    Raises:
        ConfigurationError: there are none for the target; says how to train them.
    """
    found = bench.checkpoints.get(source)
    if found is None:
        raise ConfigurationError(
            f"train them: {how_to_train(source)}",
            field="--drafter",
            verb="names",
            value=f"no weights of {source} for {bench.config.model.name}",
        )
    return found


def left_out(source: str) -> str:
    """A footnote about rows whose weights are missing."""
    return (
        f"Rows of {source} are left out: there are no weights of it for this target. To train them: {how_to_train(source)}."
    )


def parameters(folder: Path) -> int:
    """Trained numbers in a drafter's folder; those that it shares with the target are not in it."""
    return sum(_numbers(file) for file in folder.glob("*.safetensors"))


def _numbers(file: Path) -> int:
    from safetensors import safe_open

    total = 0
    with safe_open(file, "np") as stored:
        metadata: dict[str, Any] = stored.metadata() or {}
        packed = json.loads(metadata.get("kinds", "{}"))
        for name in stored.keys():  # noqa: SIM118  # it is no mapping
            part = stored.get_slice(name)
            rows, *others = part.get_shape() or [1]
            if name in packed:
                # Blocks of eight bits: the row's bytes are more than its numbers.
                total += rows * packed[name][1]
            elif part.get_dtype().startswith(("F", "BF")):
                for size in others:
                    rows *= size
                total += rows
    return total
