"""Uno's adapters that have learnt a text by heart, by the formulas of rows of noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

from tests.lossless.test_uno import Formulas
from tests.tiny_models.lora import WEIGHTS, make_adapter

# Of noise, behind each token of a text.
ROWS = 2
_STEPS = 35


def learn_noise(
    target: Path, folder: Path, tokens: Sequence[int], noise: range, *, shift: int = 0, further: int = 0
) -> Path:
    """Write an adapter by which two rows of noise behind any token guess the tokens after the next.

    Args:
        noise: the tokens of it, each as likely.
        shift: labels are so many tokens further on.
        further: rows of noise stand so many positions further on.
    """
    formulas = Formulas(target, make_adapter(folder, target, seed=8, rank=16, size=0.1), torch.float32)
    for each in formulas.adapter.values():
        each.requires_grad_()
    optimizer = torch.optim.Adam(formulas.adapter.values(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    count, noisy = len(tokens), len(tokens) * ROWS
    ends, rows = torch.arange(count)[:, None], torch.arange(ROWS)
    sees = torch.zeros(count + noisy, count + noisy, dtype=torch.bool)
    sees[:, :count] = torch.cat((ends, ends.repeat_interleave(ROWS, dim=0))) >= torch.arange(count)
    sees[count:, count:] = torch.block_diag(*[torch.ones(ROWS, ROWS).tril()] * count).bool()
    positions = [*range(count), *(ends + 1 + rows + further).flatten().tolist()]
    place = ends + 2 + rows + shift
    there = place < count
    labels = torch.tensor(tokens)[place[there]]
    for _ in range(_STEPS):
        drawn = torch.randint(noise.start, noise.stop, (noisy,), generator=generator).tolist()
        said = formulas([*tokens, *drawn], positions, [False] * count + [True] * noisy, sees)
        optimizer.zero_grad()
        functional.cross_entropy(said[count:].view(count, ROWS, -1)[there], labels).backward()
        optimizer.step()
    save_file({name: each.detach() for name, each in formulas.adapter.items()}, folder / WEIGHTS)
    return folder
