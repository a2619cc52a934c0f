"""Ranks and stages that read a copy of the model's folder, as they do on another machine: all that they compute by is the
verifier's, or the start is refused by the process, the file and the tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.model_files.weights.files import WeightFiles, quantize_folder
from services.model_files.weights.noted_reads import StoredPiece, noting_reads
from services.verifier.model.target import TransformersTarget
from services.verifier.stages import same_weights
from services.verifier.stages.same_weights import OwnFiles, files_told, read_as_told
from services.verifier.stages.upstream import StageHandle, StageSpec
from speculation.errors import ConfigurationError
from tests.engine.stage_threads import launch_thread
from tests.kernels.kernels_here import needs_kernels
from tests.lossless.test_stages import passes
from tests.lossless.test_tensor_parallel import SIZES, config
from tests.running.refusals import refuses
from tests.tiny_models.new_weights import FILE
from tests.tiny_models.tiny import make_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.xdist_group("stages"),
]
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, UP, EMBEDDED = (
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.embed_tokens.weight",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of weights, whose ends are at tensors that no test changes."""
    made = make_tiny_model(tmp_path_factory.mktemp("own"), **{**SIZES, "intermediate_size": 1024})
    weights = load_file(made / FILE)
    (made / FILE).unlink()
    # The library writes them by their names.
    apart = {FIRST: "model.layers.0", LAST: ""}
    places: dict[str, str] = {}
    for file, prefix in apart.items():
        own = {name: weights[name] for name in weights if name.startswith(prefix) and name not in places}
        places |= dict.fromkeys(own, file)
        save_file(own, made / file, metadata={"format": "pt"})
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return made


@pytest.fixture(scope="module")
def alone(folder: Path) -> torch.Tensor:
    """What one process computes."""
    return passes(TransformersTarget(config(folder)))


def flip(folder: Path, name: str, row: int) -> None:
    """The last bit of the third number of a row, in place."""
    with WeightFiles(folder) as files:
        file, width = files.file_of(name), files.shape(name)[-1]
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + begin + 4 * (row * width + 2)] ^= 1
    file.write_bytes(content)


def another_version(folder: Path) -> None:
    weights = {name: weight * 1.01 for name, weight in load_file(folder / LAST).items()}
    save_file(weights, folder / LAST, metadata={"format": "pt"})


def another_config(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "rms_norm_eps": 1e-5}))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong with a copy, and what the refusal names beside the process. ``early``: before anything is loaded."""

    plant: Callable[[Path], None]
    says: tuple[str, ...]
    early: bool = False


# Of two ranks the first, which is another process, has the first half of rows.
FAULTS = {
    "another version of one file": Fault(plant=another_version, says=(LAST,), early=True),
    "another config.json": Fault(plant=another_config, says=("config.json",), early=True),
    "a number that all ranks hold": Fault(plant=lambda folder: flip(folder, NORM, 0), says=(NORM, FIRST)),
    "a number of one rank's": Fault(plant=lambda folder: flip(folder, UP, 5), says=(UP, FIRST)),
    "an embedding of one rank's": Fault(plant=lambda folder: flip(folder, EMBEDDED, 159), says=(EMBEDDED, LAST)),
}


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@contextmanager
def target_with(folder: Path, copy: Path, ranks: int, stages: int, reads_copy: int = 0) -> Iterator[TransformersTarget]:
    """A target of which one process reads the copy."""

    def launch(spec: StageSpec) -> StageHandle:
        path = copy if spec.process == reads_copy else folder
        return launch_thread(replace(spec, config=replace(spec.config, model_path=str(path))))

    made = TransformersTarget(config(folder, ranks, stages=stages), launch)
    try:
        yield made
    finally:
        made.shutdown()


OVER = pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.exhaustive)])


@OVER
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_differs_is_named(folder: Path, copy: Path, ranks: int, stages: int, fault: Fault) -> None:
    fault.plant(copy)
    same_outlines = json.loads(files_told(copy))["contents"] == json.loads(files_told(folder))["contents"]
    assert same_outlines != fault.early
    process = "rank 0 of stage 0" if ranks > 1 else "stage 0"
    with refuses(ConfigurationError, says=process) as refused, target_with(folder, copy, ranks, stages):
        pass
    assert all(word in str(refused.value) for word in fault.says)


@OVER
def test_a_true_copy_serves(folder: Path, copy: Path, alone: torch.Tensor, ranks: int, stages: int) -> None:
    with target_with(folder, copy, ranks, stages) as made:
        assert torch.equal(passes(made), alone)


def test_a_process_started_anew_is_compared_as_well(folder: Path, copy: Path) -> None:
    with target_with(folder, copy, 2, 1) as made:
        flip(copy, UP, 5)
        with refuses(ConfigurationError, says=UP):
            made.recover()


def test_but_for_the_comparison_answers_would_be_others(
    folder: Path, copy: Path, alone: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(copy / FIRST)
    weights[UP][5] += 0.5
    save_file(weights, copy / FIRST, metadata={"format": "pt"})
    monkeypatch.setattr(OwnFiles, "check", lambda *told: None)
    with target_with(folder, copy, 2, 1) as made:
        assert not torch.equal(passes(made), alone)


def test_a_fault_in_what_a_process_does_not_read_is_none_of_its(folder: Path, copy: Path, alone: torch.Tensor) -> None:
    """The second half of rows is the verifier's, which reads its own files."""
    flip(copy, UP, 1023)
    with target_with(folder, copy, 2, 1) as made:
        assert torch.equal(passes(made), alone)


def test_weights_in_blocks_are_compared_as_they_are_stored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "own", **{**SIZES, "intermediate_size": 1024})
    quantize_folder(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with WeightFiles(copy) as files:
        file = files.file_of(UP)
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    content[8 + length + json.loads(content[8 : 8 + length])[UP]["data_offsets"][0] + 5] ^= 1
    file.write_bytes(content)
    says = f"rank 0 of stage 0 has other numbers than the verifier in {UP}"
    with refuses(ConfigurationError, says=says), target_with(folder, copy, 2, 1):
        pass


def test_the_same_files_are_not_hashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(same_weights, "noting_reads")
    with target_with(folder, folder, 2, 2) as made:
        made.beat()


def test_files_that_change_while_they_are_read_are_refused(copy: Path) -> None:
    told = files_told(copy)
    with refuses(ConfigurationError, field=str(copy)):
        read_as_told(copy, told, lambda: os.utime(copy / LAST, ns=(1, 1)))


def test_what_was_read_tells_all_of_it(folder: Path) -> None:
    """Its type and its shape, and each of its bytes, also where threads share a tensor."""
    with noting_reads() as noted, WeightFiles(folder) as files:
        files.parts(UP, 0, [range(4), range(8, 12)])
        files.parts(UP, 1, [range(64)])
        files.get(NORM)
    assert noted.digests.keys() == {
        StoredPiece(UP, 0, 0, 4),
        StoredPiece(UP, 0, 8, 12),
        StoredPiece(UP, 1, 0, 64),
        StoredPiece(NORM),
    }

    def digest(read: torch.Tensor) -> str:
        with noting_reads() as noted:
            noted.note(StoredPiece("one"), read)
        return noted.digests[StoredPiece("one")]

    large = torch.zeros(5_000_000, dtype=torch.float32)
    before = digest(large)
    assert before == digest(large.clone())
    assert before not in (digest(large.view(torch.int32)), digest(large.view(1000, 5000)), digest(large[:-1]))
    large[4_999_999] = 1
    after = digest(large)
    large[4_999_999], large[0] = 0, 1
    assert len({before, after, digest(large)}) == 3
    assert digest(torch.tensor(1.0, dtype=torch.bfloat16)) != digest(torch.tensor(1.0, dtype=torch.float16))
