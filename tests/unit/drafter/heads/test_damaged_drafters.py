"""Whatever folder is given as a drafter's weights or as an adapter's: used, or refused with one line that names it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from services.drafter.config import DrafterConfig, TrainedConfig
from services.drafter.heads.files.kinds import inspect
from services.drafter.sources.catalogue import make_source
from services.verifier.config import TargetConfig
from services.verifier.kernels.native.library import library
from services.verifier.model.target import TransformersTarget
from speculation.errors import ConfigurationError
from tests.tiny_models.damage import damage_beside
from tests.tiny_models.draft_models import draft_beside
from tests.tiny_models.lora import WITH_ENDS, make_adapter
from tests.tiny_models.trained_heads import BLOCK_KINDS, MODELS, heads_beside, make_blocks

BATCH = 16
KINDS = ("draft_model", *(kind for kind in MODELS if kind != "uno"), *(f"blocks of {kind}" for kind in BLOCK_KINDS))


def refused(folder: Path, what: str, read: Callable[[Path], object]) -> bool:
    """Whether ``read`` refuses a damaged folder.

    Raises:
        AssertionError: it does so by another error than ours, or in a sentence that does not say which file is damaged.
    """
    try:
        read(folder)
    except ConfigurationError as error:
        told = str(error)
        assert "\n" not in told and len(told) < 1000 and str(folder) in told, f"{what}: {told}"
        return True
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return False


def damaged_all(own: Path, room: Path, first: int, read: Callable[[Path], object]) -> None:
    """Damage a copy of a folder again and again."""
    count = 0
    for seed in range(first, first + BATCH):
        folder = Path(shutil.copytree(own, room / "damaged"))
        count += refused(folder, f"seed {seed}, {damage_beside(folder, seed)}", read)
        shutil.rmtree(folder)
    assert count > BATCH // 4


# Some batches are quick enough to be run always.
@pytest.mark.parametrize(
    "first", [pytest.param(at, marks=[pytest.mark.exhaustive] * (at > 0)) for at in range(0, 8 * BATCH, BATCH)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_drafters_are_refused_or_work(kind: str, first: int, tiny_model: Path, tmp_path: Path) -> None:
    own, source = _weights_of(kind, tiny_model)

    def read(folder: Path) -> None:
        # Damage may make it another kind of drafter.
        if inspect(folder, tiny_model).source == source:
            make_source(source, DrafterConfig(trained=TrainedConfig(checkpoints={source: folder}, target=tiny_model)))

    damaged_all(own, tmp_path, first, read)


def _weights_of(kind: str, target: Path) -> tuple[Path, str]:
    """The folder, and the source that runs it."""
    if kind == "draft_model":
        return draft_beside(target), kind
    if kind.startswith("blocks of "):
        name = kind.removeprefix("blocks of ")
        return make_blocks(target, target.parent / f"{target.name}-blocks-{name}", kind=name), "dflash"
    return heads_beside(target)[kind], kind


@pytest.mark.skipif(library("auto") is None, reason="no kernels of our own can be compiled here")
@pytest.mark.parametrize(
    "first", [pytest.param(at, marks=[pytest.mark.exhaustive] * (at > 0)) for at in range(0, 8 * BATCH, BATCH)]
)
def test_damaged_adapters_are_refused_or_work(first: int, tiny_model: Path, tmp_path: Path) -> None:
    own = make_adapter(tmp_path / "own", tiny_model, targets=WITH_ENDS)
    target = TransformersTarget(
        TargetConfig(model_path=str(tiny_model), kv_cache_tokens=512, threads=1, lora_folders=(tmp_path,))
    )
    names = map(str, itertools.count())
    damaged_all(own, tmp_path, first, lambda folder: target.load_adapter(next(names), folder))
