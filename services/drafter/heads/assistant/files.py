"""Loads a Gemma 4 assistant, with what it takes of its target: embeddings, and the matrices of the keys that it looks at."""

from __future__ import annotations

from pathlib import Path

import torch

from services.drafter.heads.assistant.config import ORDERING, AssistantConfig, is_assistant, is_unread, parse_assistant
from services.drafter.heads.assistant.head import AssistantHead
from services.drafter.heads.assistant.looked_at import read_keys
from services.drafter.heads.files.head_fields import refused_tensor
from services.drafter.heads.files.head_files import CONFIG
from services.drafter.heads.files.level_files import Tensors, check_numbers, read_tensors
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from services.model_files.folder import read_json, reading
from services.model_files.weights.files import WeightFiles
from services.model_files.weights.headers import read_shapes


def holds_assistant(folder: Path) -> bool:
    """Whether there is an assistant in ``folder``.

    Raises:
        ConfigurationError: its files cannot be read.
    """
    return is_assistant(read_json(folder / CONFIG, of="head"), read_shapes(folder))


def load_assistant(
    folder: Path, target: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> AssistantHead:
    """The assistant in ``folder`` for the target in ``target``.

    Raises:
        ConfigurationError: as ``parse_assistant``; or a tensor holds no finite numbers.
    """
    where = str(folder)
    tensors = {name: each for name, each in read_tensors(folder, target).items() if not is_unread(name)}
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    config = parse_assistant(
        read_json(folder / CONFIG, of="head"), shapes, read_target_shape(target), read_shapes(target), where
    )
    # Rows by id: the table is the target's largest, and few of them are asked for.
    rows = read_target_rows(target, device=device, dtype=dtype, whole=False)
    with reading(f"read the target's keys at {target}", about=target), WeightFiles(target) as files:
        keys = {
            kind: read_keys(files, each, config.target_eps, where, device, dtype) for kind, each in config.looked_at.items()
        }
    # Not accelerate's ``init_empty_weights``, which would empty what other threads load meanwhile.
    with torch.device("meta"):
        head = AssistantHead(config, rows, keys)
    head.load_state_dict(_checked(tensors, config, where, dtype), assign=True)
    head.missing_state = torch.zeros(len(head.missing_state), dtype=dtype)
    return head.to(device).requires_grad_(False).eval()


def _checked(tensors: Tensors, config: AssistantConfig, where: str, dtype: torch.dtype) -> Tensors:
    """By the module's names, in the type in which it computes."""
    ordering = tensors.pop(ORDERING, None)
    check_numbers(tensors, where)
    made = {name.removeprefix("model."): each.to(dtype) for name, each in tensors.items()}
    if ordering is None:
        return made
    every = torch.arange(config.vocab_size)
    if ordering.is_floating_point() or not torch.equal(ordering.to(torch.int64).sort().values, every):
        allowed = f"every token from 0 to {config.vocab_size - 1} once"
        raise refused_tensor(where, ORDERING, "another list", verb="holds", allowed=allowed)
    return {**made, ORDERING: ordering.to(torch.int64)}
