"""Heads are loaded as their files have them, whatever torch's default type is: transformers changes it while it makes a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from services.drafter.heads.assistant.files import load_assistant
from services.drafter.heads.blocks.files import load_blocks
from services.drafter.heads.files.head_files import is_copy, load_head
from services.drafter.heads.files.target_rows import read_target_rows
from services.drafter.heads.medusa.files import load_medusa
from services.drafter.heads.mtp.files import load_mtp
from services.drafter.heads.products import shortest
from services.drafter.heads.streams.files import load_streams
from tests.tiny_models.assistants import make_pair
from tests.tiny_models.mtp_layers import with_mtp
from tests.tiny_models.tiny import make_tiny_model
from tests.tiny_models.trained_heads import BLOCK_KINDS, make_blocks, make_head, make_medusa, make_peagle, make_streams

Made = tuple[Callable[..., nn.Module], Path, Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), num_hidden_layers=4)


def _assistant(target: Path, folder: Path) -> Made:
    pair = make_pair(folder)
    return load_assistant, pair.folder, pair.target


def _of_blocks(kind: str) -> Callable[[Path, Path], Made]:
    return lambda target, folder: (load_blocks, make_blocks(target, folder, kind=kind), target)


KINDS: Mapping[str, Callable[[Path, Path], Made]] = {
    "eagle": lambda target, folder: (load_head, make_head(target, folder, "eagle"), target),
    "eagle3": lambda target, folder: (load_head, make_head(target, folder, "eagle3"), target),
    "fspad": lambda target, folder: (load_head, make_head(target, folder, "fspad"), target),
    "peagle": lambda target, folder: (load_head, make_peagle(target, folder), target),
    "medusa": lambda target, folder: (load_medusa, make_medusa(target, folder), target),
    "streams": lambda target, folder: (load_streams, make_streams(target, folder, pruning_rank=4), target),
    "mtp": lambda target, folder: (load_mtp, with_mtp(target, folder), target),
    "assistant": _assistant,
    **{kind: _of_blocks(kind) for kind in BLOCK_KINDS},
}


@contextmanager
def another_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that it holds, what is no parameter included."""
    found = dict(module.state_dict())
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            for inner, each in [("", value), *getattr(value, "__dict__", {}).items()]:
                if isinstance(each, torch.Tensor):
                    found[f"{name}.{attribute}.{inner}"] = each
        found |= {f"{name}.{buffer}": each for buffer, each in part.named_buffers(recurse=False)}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_the_same_under_another_default_type(kind: str, target: Path, tmp_path: Path) -> None:
    load, folder, own = KINDS[kind](target, tmp_path / kind)
    plain = held(load(folder, own))
    with another_default():
        found = held(load(folder, own))
    assert found.keys() == plain.keys() and len(found) > 3
    different = [
        name for name in plain if found[name].dtype != plain[name].dtype or not torch.equal(found[name], plain[name])
    ]
    assert different == []


def test_rows_are_sampled_within_their_tables(target: Path) -> None:
    """In bfloat16 the last row's number is that of a row behind it, where numbers have more than eight bits."""
    table = read_target_rows(target).embedding
    every = torch.arange(table.shape[0] // 4 * 4)
    assert torch.tensor(float(every[-1])).bfloat16() == len(every) > 256
    own = table.rows(every)
    with another_default():
        assert is_copy(own, table, every)
        assert shortest(own).shape == own.shape
