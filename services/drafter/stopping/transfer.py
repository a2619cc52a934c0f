"""What classifiers trained on one kind of prompts do on another: ``outrider train disco`` puts it beside a classifier."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from services.model_files.folder import read_json, reading
from speculation.files import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCell:
    """A classifier trained on one kind of prompts, on answers to another.

    Attributes:
        trained, measured: the kinds.
        f1: of saying that a token will be accepted, where the target judged it; 0 to 1.
        auc: area under the ROC curve.
        speed: over plain decoding, if a pass of the draft model costs c passes of the target.
    """

    trained: str
    measured: str
    f1: float
    auc: float
    speed: float


def transfer_file(classifier: Path) -> Path:
    """Where the cells lie beside a classifier's file."""
    return classifier.with_name("transfer.json")


def write_transfer(file: Path, cells: Sequence[TransferCell]) -> None:
    """Write the cells as JSON."""
    write_whole(file, (json.dumps({"cells": [asdict(cell) for cell in cells]}, indent=1) + "\n").encode())


def read_transfer(file: Path) -> list[TransferCell]:
    """The cells of a file.

    Raises:
        ConfigurationError: it cannot be read, or is damaged.
    """
    of = "transfer of classifiers"
    written = read_json(file, of)
    with reading(f"load the {of} at {file}", about=file):
        return [TransferCell(**cell) for cell in written["cells"]]
