"""New weights of a target over stages and ranks: each process reads its own slices, all change between the same two passes, or
none does; and one that is a version behind is noticed.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from services.model_files.folder import weights_digest
from services.verifier.config import TargetConfig
from services.verifier.model import new_weights
from services.verifier.model.target import TransformersTarget
from services.verifier.stages import process, same_weights, split_weights
from services.verifier.stages.split_weights import StageWeights
from speculation.errors import ConfigurationError, TargetLost
from tests.engine.stage_forks import forked_stages, launch_fork
from tests.engine.stage_threads import targets_of_ranks
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_stages import passes
from tests.lossless.test_tensor_parallel import SIZES, config
from tests.running.refusals import refuses
from tests.tiny_models.new_weights import FILE, other_weights
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("stages"),
]
OVER = pytest.mark.parametrize(
    ("ranks", "stages"), [(2, 1), (1, 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((4, 1), (2, 2)))]
)
Make = Callable[..., TransformersTarget]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of a model."""
    folder = tmp_path_factory.mktemp("versions")
    first = make_tiny_model(folder / "a", **SIZES)
    return first, other_weights(first, folder / "b")


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> tuple[torch.Tensor, ...]:
    """What one process computes by each."""
    return tuple(passes(TransformersTarget(config(folder))) for folder in folders)


@pytest.fixture
def make(folders: tuple[Path, Path]) -> Iterator[Make]:
    def of(stages: int, tensor_parallel_size: int, folder: Path = folders[0], **options: Any) -> TargetConfig:
        return config(folder, tensor_parallel_size, stages=stages, **options)

    with targets_of_ranks(of) as made:
        yield made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[StageWeights]:
    """What the processes in threads hold beside the weights that serve."""
    found: list[StageWeights] = []
    begin = StageWeights.__init__

    def noted(self: StageWeights, *given: Any) -> None:
        begin(self, *given)
        found.append(self)

    monkeypatch.setattr(StageWeights, "__init__", noted)
    return found


def read(target: TransformersTarget, folder: Path) -> new_weights.NewWeights:
    return target.new_weights(config(folder))


@OVER
def test_all_change_between_two_passes_and_back(
    make: Make,
    folders: tuple[Path, Path],
    plain: tuple[torch.Tensor, ...],
    held: list[StageWeights],
    ranks: int,
    stages: int,
) -> None:
    target = make(ranks, stages)
    weights = read(target, folders[1])
    assert len(held) == ranks * stages - 1 and all(len(each._held) == 1 for each in held)
    for version in (0, 1, 0, 1):
        if version != target._config.model_path.endswith("b"):
            target.exchange(weights)
        assert torch.equal(passes(target), plain[version])
    # The next ones are read beside these, and what nobody here has is held nowhere.
    del weights
    gc.collect()
    again = read(target, folders[0])
    # What is to be dropped is told behind the question, so it is done by the time of the next answer.
    target.beat()
    target.beat()
    assert all(len(each._held) == 1 for each in held)
    target.exchange(again)
    assert torch.equal(passes(target), plain[0])


def test_each_process_looks_at_the_files_once(
    make: Make, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, told = make(2, 2), list[Path]()
    look = same_weights._outline
    monkeypatch.setattr(same_weights, "_outline", lambda file: (told.append(file), look(file))[1])
    read(target, folders[1])
    assert told == [folders[1] / FILE] * 4


def test_weights_are_read_while_passes_run(make: Make, folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...]) -> None:
    target, found = make(2, 2), list[new_weights.NewWeights]()
    reading = threading.Thread(target=lambda: found.append(read(target, folders[1])))
    reading.start()
    while reading.is_alive():
        assert torch.equal(passes(target), plain[0])
    target.exchange(found[0])
    assert torch.equal(passes(target), plain[1])


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"weights": "as_stored"}], ids=str)
def test_weights_in_fewer_bits(make: Make, folders: tuple[Path, Path], options: dict[str, Any]) -> None:
    wanted = passes(TransformersTarget(config(folders[1], **options)))
    target = make(2, 2, **options)
    target.exchange(target.new_weights(config(folders[1], **options)))
    assert torch.equal(passes(target), wanted)


def test_memory_of_weights_that_serve_no_more_is_given_back(make: Make, folders: tuple[Path, Path]) -> None:
    target = make(2)
    weights = read(target, folders[1])
    target.exchange(weights)
    held = [weakref.ref(pair.new) for pair in weights._pairs]
    weights.drop()
    gc.collect()
    assert held and not any(each() is not None for each in held)
    assert passes(target).isfinite().all()


def failing(own: Callable[..., Any], *given: Any, **named: Any) -> Any:
    if threading.current_thread().name.startswith("weights of stage 1"):
        raise MemoryError("no room for 5 GiB")
    return own(*given, **named)


def of_another_folder(own: Callable[..., Any], *given: Any) -> Any:
    read, told = own(*given)
    if threading.current_thread().name.startswith("weights of stage 1"):
        told = json.dumps([["model.norm.weight", 0, 0, -1, "another"]])
    return read, told


HALVES: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "no memory": (process, "weights_of_part", failing, "rank 1 of stage 0: "),
    "another version": (
        split_weights,
        "read_as_told",
        of_another_folder,
        "other numbers than the verifier in model.norm.weight",
    ),
}


@pytest.mark.parametrize("fault", ["no memory", "another version"])
def test_a_version_that_half_arrives_leaves_all_on_the_old_one(
    folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], held: list[StageWeights], fault: str,
    monkeypatch: pytest.MonkeyPatch, make: Make,
) -> None:  # fmt: skip
    where, name, planted, says = HALVES[fault]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, partial(planted, getattr(where, name)))
        target = make(2, 2)
        with refuses(ConfigurationError, says=says):
            read(target, folders[1])
    assert torch.equal(passes(target), plain[0])
    target.beat()
    assert not any(each._held for each in held)
    if fault == "another version":
        target.exchange(read(target, folders[1]))
        assert torch.equal(passes(target), plain[1])


def test_where_the_verifier_cannot_read_its_own_nobody_keeps_any(
    make: Make, folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], held: list[StageWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target = make(2, 2)

    def failing_here(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            raise ConfigurationError("it cannot be read")
        return load(*given, **named)

    load = new_weights.load_layers_beside
    with monkeypatch.context() as patch:
        patch.setattr(new_weights, "load_layers_beside", failing_here)
        with refuses(ConfigurationError, says="cannot be read"):
            read(target, folders[1])
    assert [len(each._held) for each in held] == [1, 1, 1]
    assert torch.equal(passes(target), plain[0])
    target.beat()
    assert not any(each._held for each in held)


@OVER
@pytest.mark.parametrize("noticed", [True, False], ids=["", "but for the check"])
def test_a_process_that_is_one_version_behind_is_noticed(
    make: Make, folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], held: list[StageWeights], ranks: int, stages: int,
    noticed: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target = make(ranks, stages)
    weights = read(target, folders[1])
    behind = held[0]
    with monkeypatch.context() as patch:
        patch.setattr(behind, "exchange", lambda number: None)
        if not noticed:
            patch.setattr(behind, "check", lambda version: None)
        target.exchange(weights)
        if not noticed:
            made = passes(target)
            assert not torch.equal(made, plain[0]) and not torch.equal(made, plain[1])
            return
        with pytest.raises(TargetLost):
            passes(target)
    target.recover()
    assert torch.equal(passes(target), plain[1])
    # The way back, which those that were started anew do not hold: they are once more, and compute nothing before.
    with pytest.raises(TargetLost):
        target.exchange(weights)
    with pytest.raises(TargetLost):
        passes(target)
    target.recover()
    assert torch.equal(passes(target), plain[0])


def test_whatever_fails_once_weights_are_exchanged_here_loses_the_target(
    make: Make, folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes it that nothing has changed."""
    target = make(2)
    weights = read(target, folders[1])
    with monkeypatch.context() as patch:
        patch.setattr(target._earlier._orders, "exchange", lambda number: 1 / 0)  # type: ignore[attr-defined]
        with pytest.raises(TargetLost, match="division by zero"):
            target.exchange(weights)
    target.recover()
    assert torch.equal(passes(target), plain[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["reading", "exchanging"])
def test_a_process_that_dies_comes_back_with_the_weights_that_serve(
    folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], after: str
) -> None:
    target = TransformersTarget(config(folders[0], 2, stages=2, pass_timeout_s=2.0), launch_fork)
    try:
        weights = read(target, folders[1])
        if after == "exchanging":
            target.exchange(weights)
        os.kill(forked_stages()[-2].pid, signal.SIGKILL)
        with pytest.raises(TargetLost):
            passes(target)
        target.recover()
        assert torch.equal(passes(target), plain[after == "exchanging"])
        with pytest.raises(TargetLost):
            target.exchange(weights)
        target.recover()
        assert torch.equal(passes(target), plain[after == "reading"])
    finally:
        target.shutdown()


def test_no_process_starts_anew_by_files_that_are_not_those_that_serve(
    make: Make, folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], tmp_path: Path
) -> None:
    """A checkpoint that was replaced since by the next one, under the same name."""
    folder = Path(shutil.copytree(folders[1], tmp_path / "latest"))
    target = make(2)
    target.exchange(read(target, folder))
    assert torch.equal(passes(target), plain[1])
    shutil.copy(folders[0] / FILE, folder / FILE)
    with refuses(ConfigurationError, says="start the verifier anew"):
        target.recover()


@pytest.mark.parametrize("how", ["loaded", "exchanged"])
def test_processes_start_anew_by_files_that_were_only_touched(
    how: str, make: Make, folders: tuple[Path, Path], plain: tuple[torch.Tensor, ...], tmp_path: Path
) -> None:
    """A copy of the same checkpoint over itself, as a synchronisation makes it, has another time and another inode."""
    folder = Path(shutil.copytree(folders[how == "exchanged"], tmp_path / "latest"))
    if how == "loaded":
        target = make(2, folder=folder)
        target.note_digest(weights_digest(folder))
    else:
        target = make(2)
        target.exchange(read(target, folder))
    os.utime(folder / FILE, (1, 1))
    shutil.copy(folder / FILE, tmp_path / "copy")
    (tmp_path / "copy").replace(folder / FILE)
    target.recover()
    assert torch.equal(passes(target), plain[how == "exchanged"])
    shutil.copy(folders[how == "loaded"] / FILE, folder / FILE)
    with refuses(ConfigurationError, says="start the verifier anew"):
        target.recover()


def test_a_digest_of_files_that_have_changed_since_they_were_read_is_not_taken(
    make: Make, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "latest"))
    target = make(2, folder=folder)
    shutil.copy(folders[1] / FILE, folder / FILE)
    target.note_digest(weights_digest(folder))
    with refuses(ConfigurationError, says="start the verifier anew"):
        target.recover()
